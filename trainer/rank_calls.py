"""Calls that rank 0 makes on all ranks at once, so that collectives meet.

Rank 0 calls a method of RankCalls. The method first sends the others its name and arguments, as JSON and arrays, and
they call the same method. So the driver is an ordinary program that only rank 0 runs, and no other rank knows of
services and run files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.core.errors import ComponentError, ConfigurationError, DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.core.tasks import InterruptedCallError
from services.protocol.groups import joined, split
from trainer.algorithm.packing import TrainingGroup, pack_group, unpack_group
from trainer.algorithm.training_groups import PerToken
from trainer.checkpoints.checkpoint import CheckpointStore, RunState
from trainer.config import PublishedType, TrainerSettings
from trainer.model.critic import CriticLearner
from trainer.model.kernels import KeptKernels
from trainer.model.learner import Learner, UpdateResult
from trainer.model.optimizer import StopRequestedError
from trainer.model.ranks import Ranks, error_of
from trainer.model.rounding import Rounding, UnbiasedRounding
from trainer.model.saving import DiskFullError, save_pretrained
from trainer.model.sharding import leave_gpu
from trainer.publishing.publisher import VersionWriter

log = get_logger(__name__)


class TrainingDivergedError(ComponentError):
    """The updates of more than MAX_SKIPPED_STEPS steps in a row had a loss or gradient that was not finite."""


ENDINGS = (
    ConfigurationError,
    DiskFullError,
    DependencyLostError,
    NeverReadyError,
    InterruptedCallError,
    TrainingDivergedError,
)
"""The errors by which rank 0 ends a run on every rank. A subclass comes before its base."""


def update_models(
    learner: Learner,
    critic: CriticLearner | None,
    groups: Sequence[TrainingGroup],
    step: int,
    position: float,
    should_stop: Callable[[], bool] | None = None,
) -> UpdateResult:
    """Take the optimizer steps of policy and critic on ``groups``; see RankCalls.update. A collective of all ranks."""
    result = UpdateResult()
    if critic is None or step >= learner.settings.critic_warmup_steps:
        result = learner.update(groups, step, position=position, should_stop=should_stop)
    if critic is not None and critic.trains_alone(step):
        stop = None if result.steps else should_stop
        result = result.with_critic(critic.update(groups, step, position=position, should_stop=stop))
    return result


@dataclass
class RankCalls:
    """The calls that all ranks make together: update, write a version, checkpoint, save."""

    settings: TrainerSettings
    ranks: Ranks
    learner: Learner
    writer: VersionWriter
    checkpoints: CheckpointStore
    should_stop: Callable[[], bool]
    critic: CriticLearner | None = None
    kernels: KeptKernels | None = None
    """Where rank 0 writes the kernels of its first update; None if they are not kept."""

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Release the other ranks when the driver ends; they raise the driver's error if it is one of ENDINGS.

        Any other error ends this process, and the others by their broken connections.
        """
        try:
            yield
        except ENDINGS as error:
            self._send_call("end", error=self.ranks.describe_error(error, ENDINGS))
            raise
        self._send_call("end", error=None)

    def follow(self) -> None:
        """Make the calls that rank 0 makes, until it ends the run; for every other rank.

        Raises:
            Exception: the error of ENDINGS by which rank 0 ended the run.
        """
        while True:
            name, arguments = self._receive_call()
            if name == "end":
                if arguments["error"] is not None:
                    raise error_of(arguments["error"], ENDINGS)
                return
            try:
                getattr(self, name)(**arguments)
            except (*ENDINGS, StopRequestedError) as error:
                # Rank 0 has it too, and decides what comes next.
                log.debug("call failed", call=name, reason=str(error))

    def update(self, groups: Sequence[TrainingGroup], step: int, position: float) -> UpdateResult:
        """Take the optimizer steps of policy and critic on ``groups``; see Learner.update and CriticLearner.update.

        The update stops when asked to before its first optimizer step. During CRITIC_WARMUP_STEPS the policy stays.
        """
        self._send_call("update", groups=groups, step=step, position=position)
        result = update_models(self.learner, self.critic, groups, step, position, self.should_stop)
        if self.kernels is not None and self.ranks.is_main and result.tokens:
            self.kernels.keep()
            self.kernels = None
        return result

    def values(self, groups: Sequence[TrainingGroup]) -> list[PerToken]:
        """Return the critic's values before the groups' trained tokens; see CriticLearner.values."""
        self._send_call("values", groups=groups)
        assert self.critic is not None, "only ADVANTAGE=gae has values"
        return self.critic.values(groups)

    def logprobs(
        self, groups: Sequence[TrainingGroup], temperature: float | None = None, *, use_adapters: bool = True
    ) -> list[PerToken]:
        """Return the policy's log-probabilities of the groups' trained tokens; see Learner.logprobs."""
        self._send_call("logprobs", groups=groups, temperature=temperature, use_adapters=use_adapters)
        return self.learner.logprobs(groups, temperature, use_adapters=use_adapters)

    def mean_entropy(self, groups: Sequence[TrainingGroup]) -> float | None:
        """Return the policy's mean entropy at the groups' trained tokens; see Learner.mean_entropy."""
        self._send_call("mean_entropy", groups=groups)
        return self.learner.mean_entropy(groups)

    def reference_logprobs(self, groups: Sequence[TrainingGroup]) -> list[PerToken]:
        """Return the reference's log-probabilities of the groups' trained tokens; see Learner.reference_logprobs."""
        self._send_call("reference_logprobs", groups=groups)
        return self.learner.reference_logprobs(groups)

    def teacher_logprobs(self, groups: Sequence[TrainingGroup]) -> list[PerToken | None]:
        """Return the teachers' log-probabilities of the groups' trained tokens; see Learner.teacher_logprobs."""
        self._send_call("teacher_logprobs", groups=groups)
        return self.learner.teacher_logprobs(groups)

    def teacher_overlap(self, groups: Sequence[TrainingGroup], k: int) -> float | None:
        """Return the overlap of policy and teachers in their k most likely tokens; see Learner.teacher_overlap."""
        self._send_call("teacher_overlap", groups=groups, k=k)
        return self.learner.teacher_overlap(groups, k)

    def write_policy(self, version: int) -> None:
        """Write the policy to the shared volume as ``version``, where workers that start find it."""
        self._send_call("write_policy", version=version)
        self.writer.write(version)

    def release_shared_version(self) -> None:
        """Give the GPUs' memory of a version back that all workers have copied (PUBLISH_TRANSPORT=local)."""
        self._send_call("release_shared_version")
        self.writer.release()

    def leave_gpu(self) -> None:
        """With ENGINE_SLEEPS, free GPU memory that the next step does not need; engines on the same GPUs take it."""
        if not self.settings.engine_sleeps:
            return
        self._send_call("leave_gpu")
        critic = None if self.critic is None else self.critic.module
        models = (self.learner.policy, self.learner.reference, critic, *self.learner.teachers.values())
        leave_gpu(model for model in models if model is not None)

    def save_checkpoint(self, state: RunState, *, wait: bool) -> None:
        """Start a checkpoint of ``state``; see CheckpointStore.save."""
        self._send_call("save_checkpoint", state=state.model_dump(mode="json"), wait=wait)
        self.checkpoints.save(self.learner.policy, self.learner.optimizer, state, critic=self.critic, wait=wait)

    def poll_checkpoint(self) -> None:
        """Put a checkpoint in place that has been written meanwhile."""
        self._send_call("poll_checkpoint")
        self.checkpoints.poll()

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is in place."""
        self._send_call("finish_checkpoint")
        self.checkpoints.finish()

    def save_model(self) -> None:
        """Write the trained model, and the critic, to the run directory, where transformers loads them from.

        In the published type the model is the last published version, byte for byte. Float32 keeps the masters.
        """
        self._send_call("save_model")
        settings, policy = self.settings, self.learner.policy
        is_short = settings.saved_type is PublishedType.BFLOAT16
        rounding = Rounding(getattr(torch, settings.saved_type))
        if is_short and (settings.lora_rank or settings.publish_type is PublishedType.FLOAT32):
            rounding = UnbiasedRounding()  # of weights that are not rounded yet
        with nullcontext() if is_short else policy.masters.in_place():
            save_pretrained(policy, self.ranks, settings.run_dir / "model", rounding)
        if self.critic is not None:
            with policy.masters.in_place():
                self.critic.save(settings.run_dir / "critic")

    def _send_call(self, name: str, *, groups: Sequence[TrainingGroup] | None = None, **arguments: Any) -> None:
        if not self.ranks.is_main or self.ranks.world_size == 1:
            return
        packed = b"" if groups is None else joined([pack_group(group) for group in groups])
        self.ranks.broadcast_json(
            {"name": name, "arguments": arguments, "bytes": None if groups is None else len(packed)}
        )
        if packed:
            self.ranks.broadcast_array(np.frombuffer(packed, np.uint8).copy())

    def _receive_call(self) -> tuple[str, dict[str, Any]]:
        """Return the name and arguments of rank 0's next call."""
        call = self.ranks.broadcast_json()
        arguments = call["arguments"]
        if call["bytes"] is not None:
            packed = self.ranks.broadcast_array(np.empty(call["bytes"], np.uint8)) if call["bytes"] else b""
            arguments["groups"] = [unpack_group(part) for part in split(bytes(packed))]
        if "state" in arguments:
            arguments["state"] = RunState.model_validate(arguments["state"])
        return call["name"], arguments
