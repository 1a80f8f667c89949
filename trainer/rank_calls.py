"""Calls that rank 0 makes on all ranks at once, so that collectives meet.

``RankCalls.on_all_ranks`` sends the others a method's name and arguments, as JSON and arrays, and they call the same
method. So the driver is an ordinary program that only rank 0 runs, and no other rank knows of services and run files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import torch
import transformers

from services.core.errors import ComponentError, ConfigurationError, DependencyLostError, NeverReadyError
from services.core.files import read_signed, write_signed
from services.core.logs import get_logger
from services.core.tasks import InterruptedCallError
from services.protocol.groups import joined, split
from trainer.algorithm.packing import TrainingGroup, pack_group, unpack_group
from trainer.capacity.check import compare_asleep
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.checkpoints.state import Computation, RunState
from trainer.config import PublishedType, TrainerSettings
from trainer.model.critic import CriticLearner
from trainer.model.learner import Learner, UpdateResult
from trainer.model.micro_batching import in_waves
from trainer.model.optimizer import StopRequestedError
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks, error_of
from trainer.model.rounding import Rounding
from trainer.model.saving import DiskFullError, save_pretrained
from trainer.model.sharding import leave_gpu
from trainer.publishing.writer import VersionWriter

log = get_logger(__name__)


class TrainingDivergedError(ComponentError):
    """The updates of more than MAX_SKIPPED_STEPS steps in a row had a loss or gradient that was not finite."""


@dataclass(frozen=True)
class KeptKernels:
    """Compiled kernels in a file beside the checkpoints, for one version of torch and one kind of GPU.

    With it a trainer that starts on a new pod need not compile for minutes. torch keeps kernels in /tmp, by their code,
    its options and the versions of what compiles them. Rank 0 writes those of its first update into the file, and every
    rank fills its own /tmp from it before it compiles.

    It has code and pickles, so it begins with its HMAC by JOBGROUP_TOKEN, without which whoever writes the volume could
    run code as the trainer. A damaged file, and one that was written with another token, are not used.
    """

    file: Path
    token: str

    @classmethod
    def of(cls, settings: TrainerSettings, device: torch.device) -> Self | None:
        """Return the kernels of a run for this process's torch and GPU; None without a GPU or a JOBGROUP_TOKEN."""
        if device.type != "cuda" or settings.token is None:
            return None
        name = f"kernels-{torch.__version__}-{torch.cuda.get_device_name(device)}"
        return cls(settings.checkpoint_dir / re.sub(r"[^\w.+-]", "-", name), settings.token)

    def load(self) -> None:
        """Fill torch's cache from the file, if there is one; warn if it cannot be used, because torch then compiles."""
        try:
            content = read_signed(self.file, self.token)
            if torch.compiler.load_cache_artifacts(content) is None:
                raise ValueError("torch cannot read it")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("kept kernels not used; they are compiled again", file=str(self.file), reason=str(error))
        else:
            log.info("kernels loaded", file=str(self.file), megabytes=round(len(content) / 1e6, 1))

    def keep(self) -> None:
        """Write all kernels that this process has compiled or loaded; warn if they cannot be written."""
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        try:
            write_signed(self.file, made[0], self.token)
        except OSError as error:
            log.warning("kernels not kept; a restart compiles them again", file=str(self.file), reason=str(error))


P = ParamSpec("P")
T = TypeVar("T")

PARTS = ("learner", "critic", "writer", "checkpoints")
"""The fields of RankCalls whose methods all ranks may call together."""
END = "end"

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
    waves: Sequence[int] = (),
) -> UpdateResult:
    """Take the optimizer steps of policy and critic on ``groups``; see RankCalls.update. A collective of all ranks.

    ``waves`` are the numbers of groups that the step trained on one after the other, in the order of ``groups``.
    """
    if waves:
        for wave in in_waves(groups, waves):
            learner.add_wave(wave)
        return learner.finish_waves(step, position=position)
    result = UpdateResult()
    if critic is None or step >= learner.settings.critic_warmup_steps:
        result = learner.update(groups, step, position=position)
    if critic is not None and critic.trains_alone(step):
        of_critic = critic.update(groups, step, position=position, may_stop=not result.steps)
        result = result.with_critic(of_critic)
    return result


def computation(policy: Policy, ranks: Ranks) -> Computation:
    """Return what a policy is computed with."""
    compute, is_cuda = policy.compute, ranks.device.type == "cuda"
    assert compute is not None, "load_policy sets it"
    return Computation(
        ranks=ranks.world_size,
        replicas=ranks.mesh.size(0) if ranks.mesh.ndim > 1 else 1,
        device=ranks.device.type,
        processor=torch.cuda.get_device_name(ranks.device) if is_cuda else torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        compute_type=str(compute.compute_type),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


@dataclass
class RankCalls:
    """What all ranks have of a run, and the calls that they make together."""

    settings: TrainerSettings
    ranks: Ranks
    learner: Learner
    writer: VersionWriter
    checkpoints: CheckpointStore
    critic: CriticLearner | None = None
    kernels: KeptKernels | None = None
    """Where rank 0 writes the kernels of its first update; None if they are not kept."""

    def on_all_ranks(self, method: Callable[P, T]) -> Callable[P, T]:
        """Return ``method`` as rank 0 calls it: all ranks make the call together, and rank 0's result is returned.

        Args:
            method: a method of this object or of one of its PARTS. Its arguments are JSON values; the first may be
                groups to train on.
        """
        owner = getattr(method, "__self__", None)
        [name] = [name for name in ("", *PARTS) if self._part(name) is owner]

        def call(*arguments: P.args, **named: P.kwargs) -> T:
            self._send(f"{name}.{method.__name__}", *arguments, **named)
            return method(*arguments, **named)

        return call

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Release the other ranks when the driver ends; they raise the driver's error if it is one of ENDINGS.

        Any other error ends this process, and the others by their broken connections.
        """
        try:
            yield
        except ENDINGS as error:
            self._send(END, error=self.ranks.describe_error(error, ENDINGS))
            raise
        self._send(END, error=None)

    def follow(self) -> None:
        """Make the calls that rank 0 makes, until it ends the run; for every other rank.

        Raises:
            Exception: the error of ENDINGS by which rank 0 ended the run.
        """
        while True:
            name, arguments, named = self._receive()
            if name == END:
                if named["error"] is not None:
                    raise error_of(named["error"], ENDINGS)
                return
            owner, _, method = name.rpartition(".")
            try:
                getattr(self._part(owner), method)(*arguments, **named)
            except (*ENDINGS, StopRequestedError) as error:
                # Rank 0 has it too, and decides what comes next.
                log.debug("call failed", call=name, reason=str(error))

    def update(self, groups: Sequence[TrainingGroup], step: int, position: float) -> UpdateResult:
        """Take the optimizer steps of policy and critic on ``groups``; see Learner.update and CriticLearner.update.

        The update stops when asked to before its first optimizer step. During CRITIC_WARMUP_STEPS the policy stays.
        """
        return self._kept(update_models(self.learner, self.critic, groups, step, position))

    def finish_waves(self, step: int, position: float) -> UpdateResult:
        """Take the optimizer step on all waves; see Learner.finish_waves."""
        return self._kept(self.learner.finish_waves(step, position=position))

    def _kept(self, result: UpdateResult) -> UpdateResult:
        """Return the result of an update; write the kernels of the first one."""
        if self.kernels is not None and self.ranks.is_main and result.tokens:
            self.kernels.keep()
            self.kernels = None
        return result

    def leave_gpu(self) -> None:
        """Free GPU memory that the next step does not need."""
        critic = None if self.critic is None else self.critic.module
        models = (self.learner.policy, self.learner.reference, critic, *self.learner.teachers.values())
        leave_gpu(model for model in models if model is not None)

    def compare_asleep(self) -> None:
        """Log what engines that sleep for the first time keep of the GPUs; see ``trainer.capacity.check``."""
        compare_asleep(self.settings, self.ranks)

    def save_checkpoint(self, state: dict[str, Any], *, wait: bool) -> None:
        """Start a checkpoint of a state, which is JSON here; see CheckpointStore.save."""
        self.checkpoints.save(self.learner, RunState.model_validate(state), self.critic, wait=wait)

    def save_model(self) -> None:
        """Write the trained model, and the critic, to the run directory, where transformers loads them from.

        In the published type the model is the last published version, byte for byte. Float32 keeps the masters.
        """
        settings, policy = self.settings, self.learner.policy
        is_short = settings.saved_type is PublishedType.BFLOAT16
        with nullcontext() if is_short else policy.masters.in_place():
            rounding = Rounding(getattr(torch, settings.saved_type))
            save_pretrained(policy, self.ranks, settings.run_dir / "model", rounding)
        if self.critic is not None:
            with policy.masters.in_place():
                self.critic.save(settings.run_dir / "critic")

    def _part(self, name: str) -> object:
        """Return the object of the run that has a call's method: one of this object's fields, or this object."""
        return getattr(self, name) if name else self

    def _send(self, name: str, *arguments: Any, **named: Any) -> None:
        """Send the others a call; ``name`` is that of a method, behind that of its owner and a dot."""
        if not self.ranks.is_main or self.ranks.world_size == 1:
            return
        call: dict[str, Any] = {"name": name, "arguments": [*arguments], "named": named}
        packed = b""
        if arguments and isinstance(arguments[0], Sequence):
            packed = joined([pack_group(group) for group in arguments[0]])
            call |= {"arguments": [[], *arguments[1:]], "bytes": len(packed)}
        self.ranks.broadcast_json(call)
        if packed:
            self.ranks.broadcast_array(np.frombuffer(packed, np.uint8).copy())

    def _receive(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the name and arguments of rank 0's next call."""
        call = self.ranks.broadcast_json()
        arguments = call["arguments"]
        if call.get("bytes"):
            packed = self.ranks.broadcast_array(np.empty(call["bytes"], np.uint8))
            arguments[0] = [unpack_group(part) for part in split(bytes(packed))]
        return call["name"], arguments, call["named"]
