"""A torch module as a policy: run in batches, and replaced between two batches when a new version is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.core import machine
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head import checkpoint
from services.evaluation_head.batcher import Batcher
from services.evaluation_head.packing import pack
from services.evaluation_head.policy import Decision, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import ActionSpec, EnvironmentInfo, State, StateSpec

log = get_logger(__name__)


class TorchPolicy(Policy):
    """A policy whose states are numbers and whose actions are an index or numbers."""

    kind = "torch"
    loaded: checkpoint.Loaded
    """The checkpoint in use."""

    def __init__(self, name: str, target: Path, settings: HeadSettings) -> None:
        super().__init__(name)
        self._target = target
        self._settings = settings
        if settings.head_device != "cpu":
            machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
        torch.set_num_threads(machine.threads())
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(default if settings.head_device == "auto" else settings.head_device)
        self._tried: checkpoint.Source | None = None
        self._batcher = Batcher(
            name,
            self._compute,
            batch_size=settings.head_batch_size,
            timeout_seconds=settings.head_timeout_ms / 1000,
        )

    async def __aenter__(self) -> TorchPolicy:
        try:
            self.loaded = await in_background(lambda: self._load(checkpoint.find(self._target)))
        except checkpoint.CheckpointError as error:
            raise ConfigurationError(f"policy {self.name!r}: {error}") from error
        await self._batcher.__aenter__()
        log.info("policy loaded", policy=self.name, file=str(self.loaded.source.file), device=str(self._device))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batcher.__aexit__()

    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """See Policy. Log-probabilities of indices are always there; numbers have none."""
        return await self._batcher.submit(self._encode(states))

    async def act_on_array(self, states: NDArray[np.float32], *, logprobs: bool = False) -> list[Decision]:
        """See Policy."""
        return await self._batcher.submit(self._encode(states))

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """See Policy."""
        spec = self.loaded.spec
        mine, other = f"policy {self.name!r}", environment.id
        if environment.state != spec.state:
            return f"{mine} takes {_words(spec.state)}, {other} gives {_words(environment.state)}"
        if environment.action != spec.action:
            return f"{mine} gives {_words(spec.action)}, {other} takes {_words(environment.action)}"
        return None

    def stats(self) -> dict[str, Any]:
        """See Policy."""
        batcher, loaded = self._batcher, self.loaded
        return {
            "version": loaded.source.version,
            "file": str(loaded.source.file),
            "device": str(self._device),
            "parameters": loaded.spec.parameters,
            "batch_size": self._settings.head_batch_size,
            "timeout_ms": self._settings.head_timeout_ms,
            "waiting": batcher.waiting,
            "batches": batcher.sizes.total(),
            "states": batcher.states,
            "batch_sizes": {str(size): count for size, count in sorted(batcher.sizes.items())},
            "compute_seconds": round(batcher.compute_seconds, 4),
        }

    async def refresh(self) -> None:
        """See Policy."""
        try:
            source = await in_background(lambda: checkpoint.find(self._target))
            if source in (self.loaded.source, self._tried):
                return
            # Tried once: a file that does not load now loads later only if it is written anew.
            self._tried = source
            new, old = await in_background(lambda: self._load(source)), self.loaded.spec
            if (new.spec.state, new.spec.action) != (old.state, old.action):
                raise checkpoint.CheckpointError(
                    f"{source.file} has other states or actions; restart the head to use it"
                )
        except checkpoint.CheckpointError as error:
            if str(error) != self.trouble:
                log.warning("the new version is not used", policy=self.name, error=str(error))
            self.trouble = str(error)
        else:
            self.loaded, self.trouble = new, None
            log.info("policy reloaded", policy=self.name, version=source.version, file=str(source.file))

    def _load(self, source: checkpoint.Source) -> checkpoint.Loaded:
        loaded = checkpoint.load(source, self._device)
        return replace(loaded, module=pack(loaded.module)) if self._device.type == "cpu" else loaded

    def _encode(self, states: Sequence[State] | NDArray[np.float32]) -> NDArray[np.float32]:
        """Return states as the module takes them, float32 [count, *shape].

        Raises:
            StatesRefusedError: a shape is wrong, or a number is not finite.
        """
        shape = tuple(self.loaded.spec.state.shape)
        rows = _numbers(states)
        if rows is None or rows.shape != (len(states), *shape):
            arrays = [_numbers(state) for state in states]
            at = next(i for i, array in enumerate(arrays) if array is None or array.shape != shape)
            raise StatesRefusedError(
                f"state {at} does not fit: policy {self.name!r} takes numbers of shape {list(shape)}"
            )
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32, copy=False)
        finite = np.isfinite(narrow).reshape(len(rows), -1).all(axis=1)
        if not finite.all():
            raise StatesRefusedError(f"state {int(finite.argmin())} has a number that float32 cannot hold")
        return narrow

    def _compute(self, states: NDArray[np.float32]) -> list[Decision | PolicyFailedError]:
        """Return the decisions for a batch; called in the policy's thread."""
        loaded = self.loaded
        actions, logprobs, finite = loaded.decide(states)
        version = loaded.source.version
        failed = PolicyFailedError(f"policy {self.name!r}, version {version}, gave NaN or infinity for a state")
        decisions = zip(actions, logprobs, finite, strict=True)
        return [Decision(action, version, logprob) if ok else failed for action, logprob, ok in decisions]


def _numbers(value: Any) -> NDArray[np.float64] | NDArray[np.float32] | None:
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None


def _words(spec: StateSpec | ActionSpec) -> str:
    if isinstance(spec, ActionSpec) and spec.count is not None:
        return f"{spec.kind.value} of {spec.count} from {spec.start}"
    return f"{spec.kind.value} of shape {spec.shape}"
