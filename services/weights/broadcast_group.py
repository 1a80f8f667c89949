"""The process group over which a trainer broadcasts weights to rollout workers.

The group is separate from every process's default group. Its rank 0 is the trainer's rank 0, which runs a TCP store;
every worker joins there under the group's name, as SGLang's workers do. Trainer and embedded engine both join with
``join_weights_group``.

Between GPUs weights travel in flattened buckets: the bytes of several tensors one after the other, as SGLang's
``load_format="flattened_bucket"`` has them. Over gloo they travel one by one, which takes half the time there.

NCCL forms a communicator within the first collective, which has no deadline of its own. So whoever starts a broadcast
does it in a thread that may be left behind.

A worker that dies must cost the trainer the group only. With gloo, a wait raises an error after its deadline. With
NCCL, torch's watchdog would report the failure to the monitor of the process's first group, which ends the process
minutes later. So this module makes NCCL groups in torch's blocking mode, which has no watchdog, and aborts a group
whose deadline has passed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

SOURCE = 0
"""The rank that broadcasts."""

POLL_SECONDS = 0.001

REACH_SECONDS = 30.0
"""Longest wait until rank 0 listens: it invites the workers and begins to listen at the same time."""
REACH_POLL_SECONDS = 0.1

CUMEM, CUMEM_OF_ENGINES = "NCCL_CUMEM_ENABLE", "0"
"""NCCL's variable, and its value in SGLang's engines unless a user chose another (entrypoints/engine.py)."""

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Read by torch when it makes an NCCL group; with 1 the group has no watchdog thread (ProcessGroupNCCL.cpp). Without
error handling (TORCH_NCCL_ASYNC_ERROR_HANDLING=0) it has one all the same."""


def join_weights_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: float,
) -> dist.ProcessGroup:
    """Join the group, wait until all ``world_size`` members have joined, and return it.

    Args:
        master_address: rank 0's address.
        master_port: the port on which rank 0 listens from this call on.
        rank: this process's rank in the group.
        world_size: 1 + the number of workers' ranks.
        group_name: the same for all members; a name can be joined once at a time.
        backend: ``gloo`` or ``nccl``.
        timeout: seconds for joining, and later for each broadcast.

    Raises:
        ValueError: this process has joined a group of that name already.
        RuntimeError: the other members did not join in time (also as torch.distributed.DistError), or nothing listens
            at the address.
    """
    limit = timedelta(seconds=timeout)
    match_engines_nccl()
    if rank != SOURCE:
        # TCPStore itself takes up to three times its timeout to give up an address where nothing listens.
        _wait_until_listening(master_address, master_port, min(REACH_SECONDS, timeout))
    # Not torch's rendezvous: under torchrun, it would use the launcher's store instead.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed
        master_address, master_port, world_size, is_master=rank == SOURCE, timeout=limit, multi_tenant=True
    )
    # Torch's public functions make groups of the default group's members only.
    with _without_watchdog():
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            distributed_c10d.PrefixStore(group_name, store),
            group_name=distributed_c10d.GroupName(group_name),
            timeout=limit,
        )
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    joined: dist.ProcessGroup = group
    return joined


def match_engines_nccl() -> None:
    """Choose NCCL's memory as SGLang's engines do; all members of a communicator must choose alike.

    NCCL reads the variable when a process makes its first communicator.
    """
    os.environ.setdefault(CUMEM, CUMEM_OF_ENGINES)


def flattened(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of contiguous tensors one after the other, uint8, on ``device``, copied without waiting."""
    flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=device)
    for place, tensor in zip(flat.split([tensor.nbytes for tensor in tensors]), tensors, strict=True):
        place.copy_(tensor.flatten().view(torch.uint8), non_blocking=True)
    return flat


def unflattened(flat: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return views of a flattened bucket's tensors.

    Raises:
        ValueError: a tensor does not begin at a multiple of its type's size.
    """
    tensors, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if start % dtype.itemsize:
            raise ValueError(f"a tensor of {dtype} begins at byte {start}, not a multiple of {dtype.itemsize}")
        end = start + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(flat[start:end].view(dtype).view(tuple(shape)))
        start = end
    return tensors


def send_buckets(
    buckets: Sequence[Sequence[Tensor]],
    device: torch.device,
    group: dist.ProcessGroup,
    timeout: float,
    *,
    flattens: bool,
) -> None:
    """Broadcast tensors from rank 0, each bucket in one collective if it ``flattens`` them, else tensor by tensor.

    A flattened bucket is copied to ``device`` while the one before is on its way.

    Raises:
        RuntimeError: a member left or did not answer in time; the group can no longer be used.
    """
    singly = (tensor.to(device) for tensor in chain.from_iterable(buckets))
    sent: list[tuple[Tensor, dist.Work | None]] = []
    for part in (flattened(bucket, device) for bucket in buckets) if flattens else singly:
        sent.append((part, dist.broadcast(part, group=group, group_src=SOURCE, async_op=True)))
        if len(sent) > flattens:
            _finish(*sent.pop(0), group, timeout)
    for part, work in sent:
        _finish(part, work, group, timeout)


def receive_weights(tensor: Tensor, group: dist.ProcessGroup, timeout: float) -> None:
    """Receive a contiguous tensor, of the shape and dtype that rank 0 broadcasts, into ``tensor``.

    Raises:
        RuntimeError: a member left or did not answer in time; the group can no longer be used.
    """
    _finish(tensor, dist.broadcast(tensor, group=group, group_src=SOURCE, async_op=True), group, timeout)


def _finish(tensor: Tensor, work: dist.Work | None, group: dist.ProcessGroup, timeout: float) -> None:
    if work is None:
        return
    if tensor.is_cuda:
        _wait_for_device(work, group, timeout)
    work.wait(timedelta(seconds=timeout))


def leave_weights_group(group: dist.ProcessGroup) -> None:
    """Leave the group, unless it was aborted before; its name can then be used again."""
    if group not in distributed_c10d._world.pg_map:
        return
    if dist.get_backend(group) == dist.Backend.NCCL:
        # Destroying would wait for the other members, one of which may be gone. No broadcast is under way.
        distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def _wait_until_listening(address: str, port: int, seconds: float) -> None:
    """Wait until an address accepts connections.

    Raises:
        RuntimeError: it did not within ``seconds``.
    """
    end = time.monotonic() + seconds
    reason = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
        except OSError as error:
            reason = str(error)
            time.sleep(REACH_POLL_SECONDS)
        else:
            return
    raise RuntimeError(f"nobody listens at {address}:{port} after {seconds:g} s ({reason})")


def _wait_for_device(work: dist.Work, group: dist.ProcessGroup, timeout: float) -> None:
    """Wait for a broadcast between GPUs; abort the group if it takes longer than ``timeout`` seconds.

    Work.wait alone would block the device's stream, on which the trainer computes, until a lost member answers.
    """
    end = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > end:
            distributed_c10d._abort_process_group(group)
            raise RuntimeError(f"a broadcast of weights did not end within {timeout:g} s; its group is aborted")
        time.sleep(POLL_SECONDS)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before
