"""A torch module as a policy: loaded once, run in batches, replaced between two of them when a new version is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head import checkpoint
from services.evaluation_head.batcher import Batcher
from services.evaluation_head.policy import Decision, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import EnvironmentInfo, State

log = get_logger(__name__)

HUNG_SECONDS = 60.0


class TorchPolicy(Policy):
    """States are numbers, actions an index or numbers."""

    kind = "torch"

    def __init__(self, name: str, target: Path, settings: HeadSettings) -> None:
        super().__init__(name)
        self._target = target
        self._settings = settings
        self._device = _device(settings.head_device)
        self._loaded: checkpoint.Loaded | None = None
        self._refused: tuple[int, ...] | None = None
        self._reload_trouble: str | None = None
        self._reloads = 0
        self._watching: asyncio.Task[None] | None = None
        self._batcher = Batcher(
            name,
            self._compute,
            batch_size=settings.head_batch_size,
            timeout_seconds=settings.head_timeout_ms / 1000,
            max_waiting=settings.head_max_waiting,
        )

    @property
    def loaded(self) -> checkpoint.Loaded:
        """The checkpoint that runs."""
        assert self._loaded is not None, "the policy is used before it is entered"
        return self._loaded

    async def __aenter__(self) -> TorchPolicy:
        try:
            self._loaded = await in_background(self._load_newest)
        except checkpoint.CheckpointError as error:
            raise ConfigurationError(f"HEAD_POLICIES: policy {self.name!r}: {error}") from error
        await self._batcher.__aenter__()
        self._watching = asyncio.create_task(self._watch())
        log.info("policy loaded", policy=self.name, file=str(self.loaded.source.file), device=str(self._device))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            await self._batcher.__aexit__()

    async def act(self, states: Sequence[State]) -> list[Decision]:
        """See Policy."""
        return await self._batcher.submit(self.encode(states))

    def encode(self, states: Sequence[State]) -> NDArray[np.float32]:
        """States as the module takes them.

        Raises:
            StatesRefusedError: a shape is wrong, or a number is not finite.
        """
        shape = tuple(self.loaded.spec.state.shape)
        rows = _numbers(states)
        if rows is None or rows.shape != (len(states), *shape):
            at, found = next((i, _numbers(one)) for i, one in enumerate(states) if _shape(_numbers(one)) != shape)
            has = "is not numbers of one shape" if found is None else f"has shape {list(found.shape)}"
            raise StatesRefusedError(f"state {at} {has}; policy {self.name!r} takes numbers of shape {list(shape)}")
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32)
        finite = np.isfinite(narrow).reshape(len(rows), -1).all(axis=1)
        if not finite.all():
            raise StatesRefusedError(f"state {int(finite.argmin())} has a number that float32 cannot hold")
        return narrow

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """See Policy."""
        spec = self.loaded.spec
        if environment.state != spec.state:
            return (
                f"policy {self.name!r} takes {_words(spec.state)}, {environment.id} gives {_words(environment.state)}"
            )
        if environment.action != spec.action:
            return (
                f"policy {self.name!r} gives {_words(spec.action)}, {environment.id} takes {_words(environment.action)}"
            )
        return None

    @property
    def trouble(self) -> str | None:
        """See Policy."""
        since = self._batcher.computing_since
        if since is not None and time.monotonic() - since > HUNG_SECONDS:
            return f"a batch computes for more than {HUNG_SECONDS:g} s"
        return self._reload_trouble

    @property
    def is_hung(self) -> bool:
        """Whether the module does not come back."""
        since = self._batcher.computing_since
        return since is not None and time.monotonic() - since > HUNG_SECONDS

    def stats(self) -> dict[str, Any]:
        """See Policy."""
        batcher = self._batcher
        return {
            "version": self.loaded.source.version,
            "file": str(self.loaded.source.file),
            "device": str(self._device),
            "parameters": self.loaded.spec.parameters,
            "state": self.loaded.spec.state.model_dump(),
            "action": self.loaded.spec.action.model_dump(),
            "reloads": self._reloads,
            "batch_size": self._settings.head_batch_size,
            "timeout_ms": self._settings.head_timeout_ms,
            "waiting": batcher.waiting,
            "batches": batcher.batches,
            "states": batcher.states,
            "batch_sizes": {str(size): count for size, count in sorted(batcher.sizes.items())},
            "compute_seconds": round(batcher.compute_seconds, 4),
        }

    def _load_newest(self) -> checkpoint.Loaded:
        return checkpoint.load(checkpoint.find(self._target), self._device)

    def _compute(self, rows: NDArray[np.float32]) -> list[Decision | PolicyFailedError]:
        """In the policy's thread."""
        loaded = self.loaded
        actions, finite = loaded.decide(rows)
        version = loaded.source.version
        failed = PolicyFailedError(f"policy {self.name!r}, version {version}, gave NaN or infinity for a state")
        return [Decision(a, version) if ok else failed for a, ok in zip(actions, finite, strict=True)]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.head_reload_seconds)
            try:
                await self._reload()
            except checkpoint.CheckpointError as error:
                if str(error) != self._reload_trouble:
                    log.warning("the new version is not used", policy=self.name, error=str(error))
                self._reload_trouble = str(error)

    async def _reload(self) -> None:
        source = await in_background(lambda: checkpoint.find(self._target))
        if source.stamp in (self.loaded.source.stamp, self._refused):
            return
        # Tried once: what does not load now will not load later either, unless it is written anew.
        self._refused = source.stamp
        new = await in_background(lambda: checkpoint.load(source, self._device))
        old = self.loaded.spec
        if (new.spec.state, new.spec.action) != (old.state, old.action):
            raise checkpoint.CheckpointError(f"{source.file} has other states or actions; restart the head to use it")
        self._loaded, self._refused, self._reload_trouble = new, None, None
        self._reloads += 1
        log.info("policy reloaded", policy=self.name, version=source.version, file=str(source.file))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"HEAD_DEVICE is {name!r}: {str(error).splitlines()[0]}") from error


def _numbers(value: Any) -> NDArray[np.float64] | None:
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None


def _shape(array: NDArray[np.float64] | None) -> tuple[int, ...] | None:
    return None if array is None else array.shape


def _words(spec: Any) -> str:
    about = f" of {spec.count} from {spec.start}" if getattr(spec, "count", None) else f" of shape {spec.shape}"
    return f"{spec.kind.value}{about}"
