"""A worker of the benchmark policy with its own copy of the policy, whose file is ``policy`` of its Work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from evaluation.policy import worker
from evaluation.policy.worker import Work
from services.clients.play import Decision
from services.evaluation_head import checkpoint
from services.protocol.evaluation import EpisodePosition, FinishedEpisode, State

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class OwnModel:
    """A policy that sees the states of one worker only; see Actor."""

    def __init__(self, work: Work) -> None:
        self._loaded = checkpoint.load(checkpoint.find(Path(work.policy or "")), torch.device(DEVICE))

    def act(self, _positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[Decision]:
        """Return the decisions for some states."""
        actions, _, _ = self._loaded.decide(np.asarray(states, np.float32))
        return [Decision(action) for action in actions]

    def finish(self, report: FinishedEpisode) -> None:
        """Tell nobody."""


if __name__ == "__main__":
    sys.exit(worker.main(OwnModel))
