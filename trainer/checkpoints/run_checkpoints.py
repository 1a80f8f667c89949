"""The checkpoints of a run as its driver makes them: the state of all ranks with the replay buffer's contents."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from trainer.checkpoints.checkpoint import RunState
from trainer.checkpoints.volume import DiskFullError
from trainer.config import TrainerSettings
from trainer.main_rank import MainRank
from trainer.team import Team

log = get_logger(__name__)

LEAVE_SNAPSHOT_SECONDS = 15.0
"""Longest wait for the replay buffer's snapshot when the run ends: whoever asked it to stop may kill it before long."""


@dataclass
class RunCheckpoints:
    """Saves the run's state; on rank 0."""

    settings: TrainerSettings
    services: MainRank
    team: Team
    state: RunState
    started: float = field(init=False)
    """The time at which the run would have begun without interruptions (time.monotonic)."""

    def __post_init__(self) -> None:
        self.started = time.monotonic() - self.state.seconds

    def save(self, *, wait: bool = False, snapshot_seconds: float | None = None) -> None:
        """Start a checkpoint of the last completed step, together with the replay buffer's contents.

        Args:
            wait: return only when the checkpoint is in place.
            snapshot_seconds: longest wait for the replay buffer; without it, SERVICE_DEADLINE_SECONDS.
        """
        state, label = self.state, f"{self.settings.run_id}-step-{self.state.step:06d}"
        try:
            self.services.save_replay(label, snapshot_seconds)
            state.replay_snapshot = label
        except DependencyLostError as error:
            # Weights are worth more than replay: a run that resumes from here starts with an empty buffer.
            log.warning("checkpoint without the replay buffer's contents", reason=str(error))
            state.replay_snapshot = None
        self.note_seconds()
        state.random_state = torch.get_rng_state().tolist()
        self.team.save_checkpoint(state.model_copy(deep=True), wait=wait)
        log.info("checkpoint", step=state.step, directory=str(self.settings.checkpoint_dir))

    def note_seconds(self) -> None:
        """Write into the state how long the run has taken."""
        self.state.seconds = time.monotonic() - self.started

    def poll(self) -> None:
        """Put a checkpoint in place that has been written meanwhile, and delete the snapshots of removed ones."""
        self.team.poll_checkpoint()
        for label in self.team.checkpoints.take_removed_snapshots():
            try:
                self.services.forget_replay(label)
            except DependencyLostError as error:
                log.warning("a snapshot of the replay buffer stays", snapshot=label, reason=str(error))

    def leave(self, error: Exception, *, is_recorded: bool) -> None:
        """Put a checkpoint of the last completed step in place before the run ends with ``error``.

        Before the first step there is nothing to save. On a full disk, a checkpoint that is being written is the last.

        Args:
            error: the reason of the end.
            is_recorded: whether the metrics of the last completed step could be written.
        """
        is_full = isinstance(error, DiskFullError) or not is_recorded
        try:
            if is_full or self.team.checkpoints.saved_step == self.state.step:
                self.team.finish_checkpoint()
            elif self.state.step:
                self.save(wait=True, snapshot_seconds=LEAVE_SNAPSHOT_SECONDS)
        except DiskFullError as full:
            # Not raised: it would hide why the run ends. A full disk that ends the run is said once, by its own error.
            reason = None if isinstance(error, DiskFullError) else str(full)
            log.error("no checkpoint of the last completed step", step=self.state.step, reason=reason)
