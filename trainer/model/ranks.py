"""The ranks of the trainer: who they are, and the few collectives that the loop needs beside FSDP's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from services.core.logs import get_logger

log = get_logger(__name__)

COLLECTIVE_SECONDS = 3600.0
"""Longest wait in a collective, unless another is given."""


class PeerLostError(Exception):
    """Another rank went away in the middle of a collective."""


@dataclass(frozen=True)
class Ranks:
    """This process among the trainer's processes."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only one that talks to services and writes logs."""
        return self.rank == 0

    def broadcast_json(self, value: Any = None) -> Any:
        """Rank 0's ``value`` on every rank. JSON, not pickle: what arrives over the network is never executed."""
        if self.world_size == 1:
            return value
        payload = orjson.dumps(value) if self.is_main else b""
        length = torch.tensor([len(payload)])
        dist.broadcast(length, src=0)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.is_main:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return value if self.is_main else orjson.loads(buffer.numpy().tobytes())

    def on_main(self, work: Callable[[], Any], *errors: type[Exception]) -> Any:
        """Rank 0's result of ``work``, on every rank; one of ``errors`` that it raises is raised on every rank.

        The others raise the first of ``errors`` that the error is an instance of. Any other error ends rank 0, and the
        others by their broken connections. The result must be JSON.
        """
        reply: dict[str, Any] = {}
        if self.is_main:
            try:
                reply = {"value": work()}
            except errors as error:
                if self.world_size > 1:
                    # Said first: the others may end sooner, and then this process is killed before its last words.
                    kind = next(kind.__name__ for kind in errors if isinstance(error, kind))
                    log.warning("telling the other ranks", error=kind, text=str(error))
                    self.broadcast_json({"error": kind, "text": str(error)})
                raise
        reply = self.broadcast_json(reply)
        if "error" in reply:
            raise next(kind for kind in errors if kind.__name__ == reply["error"])(reply["text"])
        return reply["value"]

    def any(self, flag: bool) -> bool:
        """True on every rank if it is true on one."""
        return self.maximum({"flag": float(flag)})["flag"] > 0

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums by name over the ranks; a name that a rank lacks counts 0."""
        return self._reduce(values, dist.ReduceOp.SUM, 0.0)

    def maximum(self, values: dict[str, float]) -> dict[str, float]:
        """Maxima by name over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX, -float("inf"))

    def _reduce(self, values: dict[str, float], operation: Any, missing: float) -> dict[str, float]:
        if self.world_size == 1:
            return values
        names = sorted({name for own in self.gather_json(sorted(values)) for name in own})
        tensor = torch.tensor([values.get(name, missing) for name in names], dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return dict(zip(names, tensor.tolist(), strict=True))

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        payload = torch.frombuffer(bytearray(orjson.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(payload)]))
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = payload
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(buffers, padded)
        return [
            orjson.loads(buffer[: int(length)].numpy().tobytes())
            for buffer, length in zip(buffers, lengths, strict=True)
        ]

    def barrier(self) -> None:
        """Waits for every rank."""
        dist.all_reduce(torch.zeros(1))


@contextmanager
def join_ranks(deadline_seconds: float = COLLECTIVE_SECONDS) -> Iterator[Ranks]:
    """Joins the process group that torchrun's variables describe; alone, a group of one.

    A rank waits in a collective for ``deadline_seconds`` at most; rank 0 may hold one open for as long as its dealings
    with the services take.

    gloo carries CPU tensors; on GPUs NCCL carries theirs. After an error on a GPU the group is left to the end of the
    process: NCCL would wait for kernels in which the peers never join, and the error would never be told.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
        rank=rank,
        world_size=world_size,
        store=HashStore() if world_size == 1 else None,
        timeout=timedelta(seconds=deadline_seconds),
    )
    failed = True
    try:
        yield Ranks(rank, world_size, device, init_device_mesh(device.type, (world_size,)))
        failed = False
    except (dist.DistError, RuntimeError) as error:
        # gloo raises plain RuntimeError when a peer's connection breaks.
        if isinstance(error, dist.DistError) or "peer" in str(error) or "gloo" in str(error):
            reason = str(error).splitlines()[0]
            raise PeerLostError(f"rank {rank} of {world_size} lost the others: {reason}; see their logs") from error
        raise
    finally:
        if not (failed and cuda):
            dist.destroy_process_group()
