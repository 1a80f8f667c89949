"""The trainer's ranks, and the few collectives that the loop needs besides FSDP's.

Before the first collective the ranks meet at a TCP store, where each states what it computes on. Ranks on different
devices would join process groups of different backends and then wait for each other for ever; a store needs no process
group, so that they end with a message instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import numpy.typing as npt
import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from services.core import machine
from services.core.endpoints import mapped_addresses
from services.core.errors import EXIT_PEER_LOST, ComponentError, ConfigurationError
from services.core.logs import get_logger
from trainer.algorithm.packing import ALONE, Context
from trainer.config import Layout

log = get_logger(__name__)

MEETING_SECONDS = 900.0
"""Longest wait for the other ranks, whose nodes start together but may install for different times."""

Facts = Mapping[str, str | None]


def choose_device() -> torch.device:
    """Return this rank's device: its GPU where torch sees any, else the processor.

    Raises:
        ConfigurationError: torch sees fewer GPUs than the node has.
    """
    machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def log_device(device: torch.device, rank: int) -> None:
    """Log the device of this rank with its name, memory and driver."""
    facts: dict[str, str | None] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts = {"name": properties.name, "memory": f"{properties.total_memory / 2**30:.1f} GiB"}
        facts |= {"driver": machine.driver_version(), "cuda": torch.version.cuda}
        if caution := machine.network_caution():
            log.warning(caution, rank=rank)
    log.info("device", rank=rank, device=str(device), **facts, torch=torch.__version__)


def meet(rank: int, world_size: int, device: torch.device, backend: str) -> Store:
    """Join the store that torchrun's variables name, and check that all ranks can compute together.

    Raises:
        ConfigurationError: the ranks differ in device, backend or torch.
        DistError: other ranks did not join within MEETING_SECONDS; the message names them.
    """
    store = _store(rank, world_size, timedelta(seconds=MEETING_SECONDS))
    facts: Facts = {"device": device.type, "backend": backend, "torch": torch.__version__, "host": socket.gethostname()}
    compare(store, rank, world_size, facts)
    return store


def _store(rank: int, world_size: int, limit: timedelta) -> Store:
    """Return a client of the store that rank 0 serves.

    torch would serve it on all addresses of the machine. Under the local runner each job group has an address of its
    own, and the same port: a second one could not listen, and its ranks would meet those of the first.
    """
    if not mapped_addresses():
        store: Store = next(rendezvous("env://", rank, world_size, timeout=limit))[0]
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    join = partial(TCPStore, host, port, world_size, timeout=limit, wait_for_workers=False)
    if rank:
        return join(is_master=False)
    try:
        listener = socket.create_server((host, port), backlog=world_size)
    except OSError as error:
        raise dist.DistNetworkError(f"{host}:{port} cannot be listened on: {error}") from error
    return join(is_master=True, master_listen_fd=listener.detach())


def compare(store: Store, rank: int, world_size: int, facts: Facts) -> None:
    """Send this rank's facts to the others, and compare theirs; ``host`` may differ. See ``meet`` for the errors."""
    keys = [f"facts/{other}" for other in range(world_size)]
    store.set(keys[rank], orjson.dumps(facts).decode())
    try:
        store.wait(keys, timedelta(seconds=MEETING_SECONDS))
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise dist.DistStoreError(f"ranks {missing} did not join within {MEETING_SECONDS:g} s") from error
    everyone: list[Facts] = [orjson.loads(store.get(key)) for key in keys]
    for name in ("device", "backend", "torch"):
        if any(others[name] != facts[name] for others in everyone):
            values = ", ".join(f"rank {other} on {of['host']}: {of[name]}" for other, of in enumerate(everyone))
            raise ConfigurationError(
                f"the ranks differ in their {name} ({values}); give all nodes of ppo-trainer the same GPUs, driver and "
                "image"
            )


COLLECTIVE_SECONDS = 15 * 60.0
"""Longest wait in a collective. A rank that ends breaks its connections, which the others notice at once; a rank that
hangs costs this time."""
MAIN_SECONDS = 6 * 3600.0
"""Longest wait for rank 0 between collectives, while it waits for services, loads or evaluates."""


class PeerLostError(ComponentError):
    """The loss of another rank in the middle of a collective."""

    exit_code = EXIT_PEER_LOST


@dataclass(frozen=True)
class Ranks:
    """This process among the trainer's processes."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    store: Store = field(default_factory=HashStore)
    """A client of the store where the ranks met, for this object alone: a wait occupies it."""
    context: Context = ALONE
    """This rank's place among the ranks that compute its micro-batches together."""
    has_rows: bool = False
    """Micro-batches are rows of paths, which a model's own forward pass reads, and no trees."""
    _calls: Iterator[int] = field(default_factory=count)

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that talks to services and writes logs."""
        return self.rank == 0

    def replicated(self, replicas: int) -> Ranks:
        """Return these ranks on a mesh that shards among neighbours and replicates the shards ``replicas`` times."""
        if replicas == 1:
            return self
        shape, names = (replicas, self.world_size // replicas), ("replicate", "shard")
        return replace(self, mesh=init_device_mesh(self.device.type, shape, mesh_dim_names=names))

    def laid_out(self, layout: Layout) -> Ranks:
        """Return these ranks for micro-batches of a layout."""
        return replace(self, has_rows=True) if layout is Layout.ROWS else self

    def in_contexts(self, size: int) -> Ranks:
        """Return these ranks in context groups of ``size`` neighbours. The mesh that shards the state stays."""
        if size == 1:
            return self
        shape, names = (self.world_size // size, size), ("data", "context")
        group = init_device_mesh(self.device.type, shape, mesh_dim_names=names)["context"].get_group()
        return replace(self, context=Context(group.group_name, self.rank % size, size))

    @property
    def n_shares(self) -> int:
        """The shares of a batch: one for each context group."""
        return self.world_size // self.context.size

    @property
    def share(self) -> int:
        """The share of this rank's context group."""
        return self.rank // self.context.size

    def broadcast_json(self, value: Any = None) -> Any:
        """Return rank 0's ``value`` on every rank. JSON and not pickle, so that no received data is ever executed."""
        if self.world_size == 1:
            return value
        self.wait_for_main()
        payload = orjson.dumps(value) if self.is_main else b""
        length = torch.tensor([len(payload)])
        dist.broadcast(length, src=0)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.is_main:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return value if self.is_main else orjson.loads(buffer.numpy().tobytes())

    def broadcast_array(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rank 0's ``array`` on every rank; the others pass one of the same shape and type to receive it in."""
        if array.size:
            dist.broadcast(torch.from_numpy(array), src=0)
        return array

    def wait_for_main(self) -> None:
        """Wait until rank 0 makes the same call. Rank 0 may take long, because this is not a collective.

        Raises:
            DistError: rank 0 did not make it within MAIN_SECONDS.
        """
        if self.world_size == 1:
            return
        key = f"main/{next(self._calls)}"
        if self.is_main:
            self.store.set(key, "")
            return
        # If the store has gone, so has rank 0. The next collective then fails, unless rank 0 took part in it before.
        with contextlib.suppress(dist.DistNetworkError):
            self.store.wait([key], timedelta(seconds=MAIN_SECONDS))

    def on_main(self, work: Callable[[], Any], *errors: type[Exception]) -> Any:
        """Run ``work`` on rank 0; return its result, which must be JSON, on every rank.

        If ``work`` raises one of ``errors``, every rank raises it; the other ranks raise the first of ``errors`` that
        the error is an instance of. Any other error ends rank 0, and then the other ranks by their broken connections.
        """
        reply: dict[str, Any] = {}
        if self.is_main:
            try:
                reply = {"value": work()}
            except errors as error:
                if self.world_size > 1:
                    self.broadcast_json({"error": self.describe_error(error, errors)})
                raise
        reply = self.broadcast_json(reply)
        if "error" in reply:
            raise error_of(reply["error"], errors)
        return reply["value"]

    def describe_error(self, error: Exception, kinds: Sequence[type[Exception]]) -> dict[str, str]:
        """Return the first of ``kinds`` that ``error`` is an instance of, and its text, for ``error_of`` elsewhere."""
        described = {"kind": next(kind.__name__ for kind in kinds if isinstance(error, kind)), "text": str(error)}
        if self.world_size > 1:
            # Logged first: once the others end, this process may be killed before it logs anything else.
            log.warning("telling the other ranks", error=described["kind"], text=described["text"])
        return described

    def any(self, flag: bool) -> bool:
        """Return True on every rank if ``flag`` is true on any rank."""
        return self.maximum({"flag": float(flag)})["flag"] > 0

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Return sums over the ranks by name; a name that a rank lacks counts 0."""
        return self._reduce(values, dist.ReduceOp.SUM, 0.0)

    def maximum(self, values: dict[str, float]) -> dict[str, float]:
        """Return maxima over the ranks by name."""
        return self._reduce(values, dist.ReduceOp.MAX, -float("inf"))

    def _reduce(self, values: dict[str, float], operation: Any, missing: float) -> dict[str, float]:
        if self.world_size == 1:
            return values
        names = sorted({name for own in self.gather_json(sorted(values)) for name in own})
        tensor = torch.tensor([values.get(name, missing) for name in names], dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return dict(zip(names, tensor.tolist(), strict=True))

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank, on every rank."""
        payload = torch.frombuffer(bytearray(orjson.dumps(value)), dtype=torch.uint8)
        return [orjson.loads(text.numpy().tobytes()) for text in self.gather_vectors(payload)]

    def gather_vectors(self, vector: Tensor) -> list[Tensor]:
        """Return every rank's vector on the CPU, by rank, on every rank. Types are equal, lengths may differ."""
        if self.world_size == 1:
            return [vector]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(vector)]))
        padded = vector.new_zeros(int(max(lengths)))
        padded[: len(vector)] = vector
        vectors = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(vectors, padded)
        return [padded[: int(length)] for padded, length in zip(vectors, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.all_reduce(torch.zeros(1))


def error_of(described: Mapping[str, str], kinds: Sequence[type[Exception]]) -> Exception:
    """Return the error that another rank described with the same ``kinds``."""
    return next(kind for kind in kinds if kind.__name__ == described["kind"])(described["text"])


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the process group that torchrun's variables describe, or without them a group of one; leave it at the end.

    gloo carries CPU tensors and NCCL GPU tensors. After an error on a GPU the group is not left: NCCL would wait for
    kernels that the other ranks never join, and the error would never be logged.

    Raises:
        ConfigurationError: torch sees fewer GPUs than the node has, or the ranks compute on different devices.
        PeerLostError: another rank did not join, or was lost during a collective.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device()
    log_device(device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    joined, failed = False, True
    try:
        store: Store = HashStore() if world_size == 1 else meet(rank, world_size, device, backend)
        dist.init_process_group(
            backend=backend,
            rank=rank,
            world_size=world_size,
            store=PrefixStore("ranks", store),
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        joined = True
        mesh = init_device_mesh(device.type, (world_size,))
        yield Ranks(rank, world_size, device, mesh, store.clone() if world_size > 1 else store)  # type: ignore[attr-defined]  # it has one
        failed = False
    except (dist.DistError, RuntimeError) as error:
        # gloo raises a plain RuntimeError when a connection to another rank breaks.
        if isinstance(error, dist.DistError) or "peer" in str(error) or "gloo" in str(error):
            reason = str(error).splitlines()[0]
            raise PeerLostError(f"rank {rank} of {world_size} lost the others: {reason}; see their logs") from error
        raise
    finally:
        if joined and not (failed and device.type == "cuda"):
            dist.destroy_process_group()
