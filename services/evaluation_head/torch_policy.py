"""Torch modules as policies: their files, and the batches in which they run.

``policy.pt2`` is written by ``torch.export``, so a head does not need the code that made the module. The versions of a
policy store are files ``v000001/policy.pt2`` below one directory; a new version is used from the next batch on.

A batch starts when it is full, when it has as many states as came together lately, or when the timeout has passed
since its oldest state came or the last batch ended. So clients that wait for the last batch share the next one with
clients that came meanwhile, instead of alternating in two halves. A batch computes in another thread while the states
of the next one arrive. Requests are read whole before their states come here, and replies are written after
their batches, so a slow client delays no other client.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import Histogram
from pydantic import BaseModel, Field
from torch.export import Dim
from torch.fx import GraphModule

from services.clients.play import Decision
from services.core import machine
from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head.policies import Policy, PolicyFailedError, StatesRefusedError, check_room
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import ActionKind, ActionSpec, EnvironmentInfo, StateSpec
from services.weights.policy_store import PolicyStore

log = get_logger(__name__)

BATCH = Histogram(
    "head_batch_states", "States in a batch.", ["policy"], buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
COMPUTE = Histogram("head_batch_seconds", "Time that a batch takes to compute.", ["policy"])
WAIT = Histogram("head_wait_seconds", "Time that a state waits until its batch starts.", ["policy"])

KEPT_BATCHES = 8
"""The last batches, whose sizes show how many states come together."""
FILE_NAME = "policy.pt2"
_SPEC = "policy.json"
MAX_BATCH = 65_536


class CheckpointError(ValueError):
    """A file that is not a usable policy; the message says why."""


class PolicySpec(BaseModel):
    """The form of a module's input and output: scores of the indices, of which the highest wins, or numbers."""

    state: StateSpec
    action: ActionSpec
    parameters: int = Field(default=0, ge=0)

    @property
    def output_shape(self) -> list[int]:
        """Shape of the module's output for one state."""
        return [self.action.count or 0] if self.action.kind is ActionKind.INDEX else self.action.shape


@dataclass(frozen=True)
class Source:
    """A checkpoint file; ``modified`` is the time in nanoseconds at which it was written."""

    version: int | None
    file: Path
    modified: int


@dataclass(frozen=True)
class Loaded:
    """A policy on its device, ready to run."""

    spec: PolicySpec
    module: GraphModule
    source: Source
    device: torch.device

    @torch.inference_mode()
    def decide(self, states: NDArray[np.float32]) -> list[Decision | PolicyFailedError]:
        """Return the decision for each of ``states`` [batch, *shape], or that its scores or numbers are not finite.

        An index has the highest score; its log-probability is that of the scores' softmax. Numbers have None.
        """
        output = self.module(torch.from_numpy(states).to(self.device)).float()
        finite = output.isfinite().reshape(len(states), -1).all(dim=1).tolist()
        actions, logprobs = output, [None] * len(states)
        if self.spec.action.kind is ActionKind.INDEX:
            best = output.argmax(dim=-1, keepdim=True)
            actions = best.squeeze(-1) + self.spec.action.start
            logprobs = output.log_softmax(dim=-1).gather(-1, best).squeeze(-1).tolist()
        version = self.source.version
        failed = PolicyFailedError(f"{self.source.file}, version {version}, gave NaN or infinity for a state")
        decisions = zip(actions.tolist(), logprobs, finite, strict=True)
        return [Decision(action, version, logprob) if ok else failed for action, logprob, ok in decisions]


def save_policy(module: torch.nn.Module, path: Path | str, state: StateSpec, action: ActionSpec) -> None:
    """Write ``module`` to ``path``, whole or not at all.

    Args:
        module: takes float32 states [batch, *state.shape]; gives scores [batch, count] or numbers [batch, *shape].
        path: the ``.pt2`` file.
        state: the form of the states, which are numbers.
        action: the form of the actions, an index or numbers.

    Raises:
        ValueError: the module's output does not have the form of ``action``.
    """
    module = module.eval()
    spec = PolicySpec(state=state, action=action, parameters=sum(p.numel() for p in module.parameters()))
    example = torch.zeros(2, *state.shape)
    with torch.no_grad():
        output = module(example)
        if list(output.shape) != [2, *spec.output_shape]:
            raise ValueError(f"the module gives {list(output.shape)} for 2 states; needed is {[2, *spec.output_shape]}")
        exported = torch.export.export(module, (example,), dynamic_shapes=({0: Dim("batch", min=1, max=MAX_BATCH)},))
    path, content = Path(path), io.BytesIO()
    torch.export.save(exported, content, extra_files={_SPEC: spec.model_dump_json()})
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content.getvalue())


def publish_policy(
    module: torch.nn.Module, directory: Path | str, version: int, state: StateSpec, action: ActionSpec
) -> Path:
    """Write ``module`` as ``version`` below ``directory``, where a running head finds it; return the file."""
    store = PolicyStore(Path(directory))
    save_policy(module, store.begin(version) / FILE_NAME, state, action)
    return store.commit(version) / FILE_NAME


def find(target: Path) -> Source:
    """Return the policy's file: ``target`` itself, or the newest version below it.

    Raises:
        CheckpointError: the file does not exist.
    """
    try:
        newest = PolicyStore(target).newest()
        if newest is None and target.is_dir():
            raise CheckpointError(_not_a_store(target))
        file = newest.path / FILE_NAME if newest else target
        return Source(newest.version if newest else None, file, file.stat().st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"no policy at {target}: {error}") from error


def _not_a_store(directory: Path) -> str:
    if (directory / "config.json").exists():
        return f"{directory} is a language model; serve it, and give the server's URL, such as http://127.0.0.1:30000"
    return f"{directory} has no versions; needed is a directory of versions with v000001/{FILE_NAME}, or a .pt2 file"


def load(source: Source, device: torch.device) -> Loaded:
    """Read a checkpoint and try it on one state and on several.

    Raises:
        CheckpointError: the file is not a policy, or its output does not have the form that it says.
    """
    about = {_SPEC: ""}
    try:
        module = torch.export.load(source.file, extra_files=about).module().to(device)
        spec = PolicySpec.model_validate_json(about[_SPEC])
        with torch.inference_mode():
            shapes = [list(module(torch.zeros(n, *spec.state.shape, device=device)).shape) for n in (1, 3)]
    # torch raises errors of many types for a file that is damaged or something else.
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        raise CheckpointError(f"{source.file} cannot be read: {why}; needed is a .pt2 file of save_policy") from error
    if shapes != [[n, *spec.output_shape] for n in (1, 3)]:
        raise CheckpointError(f"{source.file} gives {shapes[0]} for one state, not {[1, *spec.output_shape]}")
    return Loaded(spec, module, source, device)


class _Request(NamedTuple):
    """States of one client that wait for their decisions, at most as many as a batch has."""

    states: NDArray[np.float32]
    """[count, *shape]"""
    done: asyncio.Future[list[Decision | PolicyFailedError]]
    arrived: float


class TorchPolicy(Policy):
    """A policy whose states are numbers and whose actions are an index or numbers."""

    kind = "torch"
    loaded: Loaded
    """The checkpoint in use."""

    def __init__(self, name: str, target: Path, settings: HeadSettings) -> None:
        self._size, self._timeout = settings.head_batch_size, settings.head_timeout_ms / 1000
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = default if settings.head_device == "auto" else settings.head_device
        super().__init__(name, device=device, batch_size=self._size, timeout_ms=settings.head_timeout_ms)
        if settings.head_device != "cpu":
            machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
        torch.set_num_threads(machine.threads())
        self._target = target
        self._device = torch.device(device)
        self._tried: Source | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"policy-{name}")
        self._batch, self._seconds, self._wait = BATCH.labels(name), COMPUTE.labels(name), WAIT.labels(name)
        self._queue: deque[_Request] = deque()
        self._came = asyncio.Event()
        self._waiting = 0
        """States whose batch has not started yet."""
        self._together = deque([self._size], KEPT_BATCHES)
        """For each of the last batches: the number of its states and of the states that came while it computed."""
        self._ended = 0.0
        """When the last batch ended, by time.monotonic."""
        self._sizes: Counter[int] = Counter()
        """Batches by their number of states."""
        self._compute_seconds = 0.0

    async def __aenter__(self) -> TorchPolicy:
        try:
            self.loaded = await in_background(lambda: load(find(self._target), self._device))
        except CheckpointError as error:
            raise ConfigurationError(f"policy {self.name!r}: {error}") from error
        self._running = asyncio.create_task(self._run())
        log.info("policy loaded", policy=self.name, file=str(self.loaded.source.file), device=str(self._device))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def act(self, states: Sequence[Any], *, logprobs: bool = False) -> list[Decision]:
        """See Policy. Log-probabilities of indices are always there; numbers have none."""
        rows = self._encode(states)
        rate = self.states / self._compute_seconds if self._compute_seconds else float(self._size)
        check_room(self._waiting, len(rows), retry_after=min(30, 1 + int(self._waiting / rate)))
        loop, now = asyncio.get_running_loop(), time.monotonic()
        parts = [rows[start : start + self._size] for start in range(0, len(rows), self._size)]
        requests = [_Request(part, loop.create_future(), now) for part in parts]
        self._queue.extend(requests)
        self._waiting += len(rows)
        self._came.set()
        try:
            decided = [*itertools.chain(*await asyncio.gather(*(request.done for request in requests)))]
        finally:
            # The states of a client that left are skipped.
            for request in requests:
                request.done.cancel()
        if failures := [one for one in decided if isinstance(one, PolicyFailedError)]:
            raise failures[0]
        return [decision for decision in decided if isinstance(decision, Decision)]

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
        return super().stats() | {
            "version": self.loaded.source.version,
            "file": str(self.loaded.source.file),
            "parameters": self.loaded.spec.parameters,
            "waiting": self._waiting,
            "batches": self._sizes.total(),
            "batch_sizes": {str(size): count for size, count in sorted(self._sizes.items())},
            "compute_seconds": round(self._compute_seconds, 4),
        }

    async def refresh(self) -> None:
        """See Policy."""
        try:
            source = await in_background(lambda: find(self._target))
            if source in (self.loaded.source, self._tried):
                return
            # Tried once: a file that does not load now loads later only if it is written again.
            self._tried = source
            new, old = await in_background(lambda: load(source, self._device)), self.loaded.spec
            if (new.spec.state, new.spec.action) != (old.state, old.action):
                raise CheckpointError(f"{source.file} has other states or actions; restart the head to use it")
        except CheckpointError as error:
            if str(error) != self.trouble:
                log.warning("the new version is not used", policy=self.name, error=str(error))
            self.trouble = str(error)
        else:
            self.loaded, self.trouble = new, None
            log.info("policy reloaded", policy=self.name, version=source.version, file=str(source.file))

    def _encode(self, states: Sequence[Any]) -> NDArray[np.float32]:
        """Return states as the module takes them, float32 [count, *shape].

        Raises:
            StatesRefusedError: a shape is wrong, or a number is not finite.
        """
        shape = tuple(self.loaded.spec.state.shape)
        rows = _numbers(states)
        if rows is None or rows.shape != (len(states), *shape):
            arrays = [_numbers(state) for state in states]
            at = next(i for i, array in enumerate(arrays) if array is None or array.shape != shape)
            takes = f"policy {self.name!r} takes numbers of shape {list(shape)}"
            raise StatesRefusedError(f"state {at} does not fit: {takes}")
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32)
        finite = np.isfinite(narrow).reshape(len(rows), -1).all(axis=1)
        if not finite.all():
            raise StatesRefusedError(f"state {int(finite.argmin())} has a number that float32 cannot hold")
        return narrow

    async def _run(self) -> None:
        """Compute batch after batch."""
        while True:
            await self._wait_for(1)
            left = max(self._queue[0].arrived, self._ended) + self._timeout - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wait_for(min(self._size, max(self._together)))
            batch = self._next_batch()
            size = sum(len(request.states) for request in batch)
            if present := [request for request in batch if not request.done.done()]:
                await self._decide(present)
            self._ended = time.monotonic()
            self._together.append(min(self._size, size + self._waiting))

    async def _wait_for(self, states: int) -> None:
        """Wait until a number of states wait for their batch."""
        while self._waiting < states:
            self._came.clear()
            await self._came.wait()

    def _next_batch(self) -> list[_Request]:
        """Take the oldest requests from the queue, as many as fit into a batch."""
        batch: list[_Request] = []
        room = self._size
        while self._queue and len(self._queue[0].states) <= room:
            batch.append(self._queue.popleft())
            room -= len(batch[-1].states)
        self._waiting -= self._size - room
        return batch

    async def _decide(self, batch: Sequence[_Request]) -> None:
        """Compute the decisions for one batch, or for its states the error."""
        started = time.monotonic()
        for request in batch:
            self._wait.observe(started - request.arrived)
        states = np.concatenate([request.states for request in batch])
        decisions: Sequence[Decision | PolicyFailedError]
        try:
            loop = asyncio.get_running_loop()
            decisions = await loop.run_in_executor(self._thread, self.loaded.decide, states)
        # The user's module may raise anything. The batch's clients get the error, and the next batch is computed.
        except Exception as error:  # noqa: BLE001
            log.warning("a batch failed", states=len(states), error=repr(error))
            decisions = [PolicyFailedError(f"the policy raised {type(error).__name__}: {error}")] * len(states)
        seconds = time.monotonic() - started
        self._sizes[len(states)] += 1
        self.states += len(states)
        self._compute_seconds += seconds
        self._batch.observe(len(states))
        self._seconds.observe(seconds)
        remaining = iter(decisions)
        for request in batch:
            own = list(itertools.islice(remaining, len(request.states)))
            if not request.done.done():
                request.done.set_result(own)


def _numbers(value: Any) -> NDArray[np.float64] | None:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None


def _words(spec: StateSpec | ActionSpec) -> str:
    if isinstance(spec, ActionSpec) and spec.count is not None:
        return f"{spec.kind.value} of {spec.count} from {spec.start}"
    return f"{spec.kind.value} of shape {spec.shape}"
