"""The checkpoints of a run as its driver makes them: the state of all ranks with the replay buffer's contents.

``resume`` returns a run to its newest checkpoint: the trainer's state and the published versions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from services.chat.tokenizers import tokenizer_digest
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.run_ids import job_id
from services.protocol.prompts import DataStats
from services.weights.policy_store import PolicyStore
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.checkpoints.state import Fingerprint, RunState, TeacherPrint, check_same
from trainer.config import Mode, TrainerSettings
from trainer.model.critic import CriticLearner
from trainer.model.learner import Learner
from trainer.model.loading import count_parameters
from trainer.model.saving import DiskFullError
from trainer.rank_calls import RankCalls
from trainer.rollouts.service_calls import ServiceCalls

log = get_logger(__name__)


LEAVE_SNAPSHOT_SECONDS = 15.0
"""Longest wait for the replay buffer's snapshot when the run ends: it may be killed soon after it was asked to stop."""


@dataclass
class RunCheckpoints:
    """Saves the run's state; on rank 0."""

    settings: TrainerSettings
    state: RunState
    services: ServiceCalls
    """Saves and deletes snapshots of the replay buffer."""
    rank_calls: RankCalls

    def __post_init__(self) -> None:
        self.store, self.on_all_ranks = self.rank_calls.checkpoints, self.rank_calls.on_all_ranks
        self.started = time.monotonic() - self.state.seconds
        """The time at which the run would have begun without interruptions (time.monotonic)."""

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
        self.on_all_ranks(self.rank_calls.save_checkpoint)(state.model_dump(mode="json"), wait=wait)
        log.info("checkpoint", step=state.step, directory=str(self.settings.checkpoint_dir))

    def note_seconds(self) -> None:
        """Write into the state how long the run has taken."""
        self.state.seconds = time.monotonic() - self.started

    def poll(self) -> None:
        """Put a checkpoint in place that has been written meanwhile, and delete the snapshots of removed ones."""
        self.on_all_ranks(self.store.poll)()
        self._forget_snapshots()

    def _forget_snapshots(self, deadline: float | None = None) -> None:
        """Delete the replay buffer's snapshots of removed checkpoints."""
        for label in self.store.take_removed_snapshots():
            try:
                self.services.forget_replay(label, deadline)
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
            if is_full or self.store.saved_step == self.state.step:
                self.on_all_ranks(self.store.finish)()
            elif self.state.step:
                self.save(wait=True, snapshot_seconds=LEAVE_SNAPSHOT_SECONDS)
                self._forget_snapshots(LEAVE_SNAPSHOT_SECONDS)
        except DiskFullError as full:
            # Not raised: it would hide why the run ends. A full disk that ends the run is reported by its own error.
            reason = None if isinstance(error, DiskFullError) else str(full)
            log.error("no checkpoint of the last completed step", step=self.state.step, reason=reason)


def resume(
    learner: Learner,
    checkpoints: CheckpointStore,
    data: DataStats,
    critic: CriticLearner | None = None,
    probes: Mapping[str, list[float]] | None = None,
) -> RunState:
    """Load the newest checkpoint and return its state; without one return a fresh state. A collective.

    ``probes`` has what teachers behind a URL say of the probe, by URL, on rank 0.

    Raises:
        ConfigurationError: no checkpoint can be used, or the newest has another model or other data.
    """
    settings, ranks, policy = learner.settings, learner.ranks, learner.policy
    of_critic = 0 if critic is None or critic.is_shared else count_parameters(critic.module)
    state = fresh = RunState(
        model_type=policy.config.model_type,
        parameters=count_parameters(policy) + of_critic,
        fingerprint=_fingerprint(learner, data, probes or {}),
        job=job_id(),
    )
    newest = checkpoints.newest(fresh.model_type, fresh.parameters)
    if newest is not None:
        path, state = newest
        ranks.on_main(partial(_check_resumed, settings, path, state, fresh), ConfigurationError)
        state.job = fresh.job
        checkpoints.load(path, learner, critic)
        if state.random_state:
            torch.set_rng_state(torch.tensor(state.random_state, dtype=torch.uint8))
        log.info("resumed", checkpoint=str(path), step=state.step)
    # An earlier attempt may have published versions before its first checkpoint, too.
    state.policy_version = ranks.on_main(lambda: _next_version(settings, state.policy_version))
    return state


def _fingerprint(learner: Learner, data: DataStats, probes: Mapping[str, list[float]]) -> Fingerprint | None:
    """Return the fingerprint of model and data on rank 0, which saves it; None on the others."""
    settings, described = learner.settings, learner.policy.description
    if described is None:
        return None
    of_teachers = {name: teacher.description for name, teacher in learner.teachers.items()}
    weights = {name: of_teacher.weights_digest for name, of_teacher in of_teachers.items() if of_teacher is not None}
    return Fingerprint(
        teachers={
            source: TeacherPrint(name=name, weights=weights.get(name, ""), probe=probes.get(name.rstrip("/"), []))
            for source, name in settings.teachers.items()
            if name
        },
        model=settings.model_name,
        weights=described.weights_digest,
        tokenizer=tokenizer_digest(described.tokenizer),
        dataset=data.source,
        data=data.fingerprint,
    )


def _check_resumed(settings: TrainerSettings, path: Path, state: RunState, fresh: RunState) -> None:
    """Refuse a checkpoint with another model or other data; log when another job continues a run."""
    assert fresh.fingerprint is not None, "rank 0 has the model's description"
    assert state.fingerprint is not None, "every trainer saves it"
    check_same(settings, path, state.fingerprint, fresh.fingerprint)
    if "run_id" not in settings.model_fields_set and state.job != fresh.job:
        log.warning(
            "another job, or one before a restart of the jobs controller, started this run; this job continues it. "
            "Give another RUN_ID to begin a new run",
            run=settings.run_id,
            step=state.step,
            begun_by=state.job,
            job=fresh.job,
        )


def _next_version(settings: TrainerSettings, version: int) -> int:
    """Return the version under which to publish the policy of a state that was saved as ``version`` (fresh: 0)."""
    store = PolicyStore(settings.policy_dir)
    # In synchronous mode the resumed run publishes the versions after the checkpoint again, with the same weights. In
    # asynchronous mode the queue may still hold groups of the abandoned steps, so no version is used twice, not even
    # one that was only begun: with PUBLISH_TRANSPORT=broadcast workers serve a version that is still being written.
    begun = store.newest_begun()
    if settings.mode is Mode.ASYNC and begun is not None:
        version = max(version, begun + 1)
    store.discard_after(version)
    return version
