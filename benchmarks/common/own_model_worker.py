"""A worker of ``benchmarks.policy`` with its own copy of the policy, whose file is ``policy`` of its Work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from evaluation.policy import worker
from evaluation.policy.records import Work
from services.evaluation_head import checkpoint
from services.protocol.evaluation import Action, EpisodePosition, FinishedEpisode, State

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class OwnModel:
    """A policy that sees one state at a time; see Actor."""

    def __init__(self, work: Work) -> None:
        self._loaded = checkpoint.load(checkpoint.find(Path(work.policy or "")), torch.device(DEVICE))

    def act(self, _position: EpisodePosition, state: State) -> tuple[Action, int | None]:
        """Return the action for a state."""
        [action], _, _ = self._loaded.decide(np.asarray([state], np.float32))
        return action, None

    def finish(self, report: FinishedEpisode) -> None:
        """Tell nobody."""


if __name__ == "__main__":
    sys.exit(worker.main(OwnModel))
