"""A torch module as a policy: it runs in batches, and is replaced between two batches when a new version appears.

A batch starts when it is full, when it has as many states as came together lately, or when the timeout has passed
since its oldest state came or the last batch ended. So clients that wait for the last batch share the next one with
clients that came meanwhile, instead of alternating in two halves. A batch computes in another thread while the states
of the next one arrive. Requests are read whole before their states come here, and replies are written after
their batches, so a slow client delays no other client.

On a CPU a plain matrix product chooses its kernel by the number of rows, so that scores change in their last bits with
the batch. The embedded engine's layer with a packed weight does not, so a state gets the same decision alone and in any
batch; it is also faster for batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import Histogram
from torch import Tensor
from torch.fx import GraphModule, Node

from services.clients.play import Decision
from services.core import machine
from services.core.errors import ConfigurationError
from services.core.linear import make_linear
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head import checkpoint
from services.evaluation_head.policy import Policy, PolicyFailedError, StatesRefusedError, check_finite, check_room
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import ActionSpec, EnvironmentInfo, StateSpec

log = get_logger(__name__)


BATCH = Histogram(
    "head_batch_states", "States in a batch.", ["policy"], buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
COMPUTE = Histogram("head_batch_seconds", "Time that a batch takes to compute.", ["policy"])
WAIT = Histogram("head_wait_seconds", "Time that a state waits until its batch starts.", ["policy"])

KEPT_BATCHES = 8
"""The last batches, whose sizes show how many states come together."""

_Piece = tuple["_Request", NDArray[np.float32]]
"""Some of a request's states [count, *shape], in order."""
Compute = Callable[[NDArray[np.float32]], Sequence[Decision | PolicyFailedError]]


class TorchPolicy(Policy):
    """A policy whose states are numbers and whose actions are an index or numbers."""

    kind = "torch"
    takes_arrays = True
    loaded: checkpoint.Loaded
    """The checkpoint in use."""

    def __init__(self, name: str, target: Path, settings: HeadSettings) -> None:
        size, timeout_ms = settings.head_batch_size, settings.head_timeout_ms
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = default if settings.head_device == "auto" else settings.head_device
        super().__init__(name, device=device, batch_size=size, timeout_ms=timeout_ms)
        self._target = target
        if settings.head_device != "cpu":
            machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
        torch.set_num_threads(machine.threads())
        self._device = torch.device(device)
        self._tried: checkpoint.Source | None = None
        self._batcher = Batcher(name, self._compute, batch_size=size, timeout_seconds=timeout_ms / 1000)

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

    async def act(self, states: Sequence[Any], *, logprobs: bool = False) -> list[Decision]:
        """See Policy. Log-probabilities of indices are always there; numbers have none."""
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
        return super().stats() | {
            "version": loaded.source.version,
            "file": str(loaded.source.file),
            "parameters": loaded.spec.parameters,
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
            # Tried once: a file that does not load now loads later only if it is written again.
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
            raise StatesRefusedError(
                f"state {at} does not fit: policy {self.name!r} takes numbers of shape {list(shape)}"
            )
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32, copy=False)
        check_finite(narrow, "a number that float32 cannot hold")
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


class Linear(torch.nn.Module):
    """A linear layer with a weight that is packed if the processor's library can."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._layer = make_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for ``x`` [..., in]."""
        rows = self._layer(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], rows.shape[-1])


def pack(module: GraphModule) -> GraphModule:
    """Replace the float32 linear layers of an exported module on the CPU; return the module.

    Weights that the module also uses elsewhere are kept in addition to their packed copies.
    """
    for index, node in enumerate(list(module.graph.nodes)):
        if node.target is not torch.ops.aten.linear.default:
            continue
        weight, bias = (_parameter(module, source) for source in (*node.args[1:], None)[:2])
        if weight is None or weight.dtype is not torch.float32 or (bias is None) != (len(node.args) < 3):
            continue
        name = f"packed_{index}"
        module.add_submodule(name, Linear(weight.detach(), None if bias is None else bias.detach()))
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_module(name, (node.args[0],)))
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    module.delete_all_unused_submodules()
    return module


def _parameter(module: GraphModule, node: object) -> Tensor | None:
    """Return the tensor that a node of the module's graph gets; None if it computes one."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    return value if isinstance(value, Tensor) else None


@dataclass(eq=False)
class _Request:
    """States [count, *shape] that wait for decisions, and the decisions so far."""

    states: NDArray[np.float32]
    done: asyncio.Future[list[Decision]]
    arrived: float = field(default_factory=time.monotonic)
    decisions: list[Decision] = field(default_factory=list)

    def take(self, decisions: Sequence[Decision | PolicyFailedError]) -> None:
        """Take the decisions for the next states; end the request with the last one or with an error."""
        failed = next((decision for decision in decisions if isinstance(decision, PolicyFailedError)), None)
        self.decisions += [decision for decision in decisions if isinstance(decision, Decision)]
        if self.done.done():
            return
        if failed is not None:
            self.done.set_exception(failed)
        elif len(self.decisions) == len(self.states):
            self.done.set_result(self.decisions)


class Batcher:
    """The batches of one policy. An async context manager."""

    def __init__(self, name: str, compute: Compute, *, batch_size: int, timeout_seconds: float) -> None:
        self._compute = compute
        self._batch_size = batch_size
        self._timeout = timeout_seconds
        self._queue: asyncio.Queue[_Piece] = asyncio.Queue()
        self._rest: _Piece | None = None
        """States of the last piece that found no room in its batch."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"policy-{name}")
        self._running: asyncio.Task[None] | None = None
        self._batch, self._seconds, self._wait = BATCH.labels(name), COMPUTE.labels(name), WAIT.labels(name)
        self.waiting = 0
        """States whose batch has not started yet."""
        self._together = deque([batch_size], KEPT_BATCHES)
        """For each of the last batches: the number of its states and of the states that came while it computed."""
        self._ended = 0.0
        """When the last batch ended, by time.monotonic."""
        self.sizes: Counter[int] = Counter()
        """Batches by their number of states."""
        self.states = 0
        self.compute_seconds = 0.0

    async def __aenter__(self) -> Batcher:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def submit(self, states: NDArray[np.float32]) -> list[Decision]:
        """Return the decisions for ``states`` [count, *shape], in order.

        Raises:
            OverloadedError: too many states wait.
            PolicyFailedError: the policy raised, or its output is not an action.
        """
        rate = self.states / self.compute_seconds if self.compute_seconds else float(self._batch_size)
        check_room(self.waiting, len(states), retry_after=min(30, 1 + int(self.waiting / rate)))
        request = _Request(states, asyncio.get_running_loop().create_future())
        self._queue.put_nowait((request, states))
        self.waiting += len(states)
        try:
            return await request.done
        finally:
            # The states of a client that left are skipped.
            request.done.cancel()

    async def _run(self) -> None:
        while True:
            pieces = [await self._next(self._batch_size)]
            size = len(pieces[0][1])
            left = max(pieces[0][0].arrived, self._ended) + self._timeout - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    # After the timeout this still takes the states that are there, because it does not wait for them.
                    while size < self._batch_size and (size < max(self._together) or self._has_more):
                        pieces.append(await self._next(self._batch_size - size))
                        size += len(pieces[-1][1])
            self.waiting -= size
            if pieces := [(request, states) for request, states in pieces if not request.done.done()]:
                await self._decide(pieces)
            self._ended = time.monotonic()
            self._together.append(min(self._batch_size, size + self.waiting))

    @property
    def _has_more(self) -> bool:
        return self._rest is not None or not self._queue.empty()

    async def _next(self, room: int) -> _Piece:
        """Return the next states of one request, ``room`` of them at most."""
        request, states = self._rest or await self._queue.get()
        self._rest = (request, states[room:]) if len(states) > room else None
        return request, states[:room]

    async def _decide(self, pieces: Sequence[_Piece]) -> None:
        """Compute the decisions for one batch."""
        started = time.monotonic()
        for request in {request for request, _ in pieces}:
            self._wait.observe(started - request.arrived)
        states = np.concatenate([states for _, states in pieces])
        decisions: Sequence[Decision | PolicyFailedError]
        try:
            decisions = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, states)
        # The user's module may raise anything. The batch's clients get the error, and the next batch is computed.
        except Exception as error:  # noqa: BLE001
            log.warning("a batch failed", states=len(states), error=repr(error))
            decisions = [PolicyFailedError(f"the policy raised {type(error).__name__}: {error}")] * len(states)
        seconds = time.monotonic() - started
        self.sizes[len(states)] += 1
        self.states += len(states)
        self.compute_seconds += seconds
        self._batch.observe(len(states))
        self._seconds.observe(seconds)
        start = 0
        for request, part in pieces:
            request.take(decisions[start : start + len(part)])
            start += len(part)
