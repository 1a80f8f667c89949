"""The process group over which a trainer broadcasts weights to rollout workers.

It is no part of any process's default group: trainer rank 0 is its rank 0 and holds a TCP store, at which every worker
meets it under the group's name, as SGLang's workers do. Trainer and embedded engine join with this same function.

A worker that dies must cost the trainer a group, not its life. gloo's waits raise when a deadline passes; for NCCL's
torch's watchdog ends the process. So an NCCL group is made without that, and given up here when a deadline passes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

SOURCE = 0
"""The rank that broadcasts."""

POLL_SECONDS = 0.001

REACH_SECONDS = 30.0
"""Longest wait until rank 0 listens. It invites the others and begins to listen at the same time."""
REACH_POLL_SECONDS = 0.1

ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Read by torch when an NCCL group is made; 0 leaves what is to become of a failed group to its owner."""


def join_weights_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: float,
) -> dist.ProcessGroup:
    """Joins the group; returns when all ``world_size`` members have.

    Args:
        master_address: where rank 0 is reached.
        master_port: where rank 0 listens from this call on.
        rank: of this process in the group.
        world_size: 1 + the number of workers.
        group_name: the same for all members, and used once at a time.
        backend: ``gloo`` or ``nccl``.
        timeout: seconds for joining, and later for each broadcast.

    Raises:
        ValueError: a group of that name is joined already.
        RuntimeError: the others did not come in time (torch.distributed.DistError among them), or nobody listens at
            the address.
    """
    limit = timedelta(seconds=timeout)
    if rank != SOURCE:
        # TCPStore itself takes up to three times its time-out to give up an address at which nobody listens.
        _wait_until_reached(master_address, master_port, min(REACH_SECONDS, timeout))
    # Not torch's rendezvous: under torchrun that would take the launcher's store for this one.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed
        master_address, master_port, world_size, is_master=rank == SOURCE, timeout=limit, multi_tenant=True
    )
    # Torch's public functions make groups of the default group's members only.
    with _errors_left_to_the_owner():
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


def broadcast_weights(tensor: Tensor, group: dist.ProcessGroup, timeout: float) -> None:
    """Sends ``tensor`` from the group's rank 0 to all others, or receives into it; contiguous, the same everywhere.

    Raises:
        RuntimeError: a member left or did not answer in time; the group cannot be used any more.
    """
    work = dist.broadcast(tensor, group=group, group_src=SOURCE, async_op=True)
    if work is None:
        return
    if tensor.is_cuda:
        _wait_for_device(work, group, timeout)
    work.wait(timedelta(seconds=timeout))


def leave_weights_group(group: dist.ProcessGroup) -> None:
    """Leaves the group, if it was not given up before; its name can then be used again."""
    if group not in distributed_c10d._world.pg_map:
        return
    if dist.get_backend(group) == dist.Backend.NCCL:
        # Destroying waits for the other members, of which one may be gone; every broadcast was waited for.
        distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def _wait_until_reached(address: str, port: int, seconds: float) -> None:
    """Waits until somebody listens at an address.

    Raises:
        RuntimeError: nobody did within ``seconds``.
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
    """Waits for a broadcast between GPUs; gives the group up when it takes longer than ``timeout`` seconds.

    Work.wait would first have the device's stream, on which the trainer computes, wait for a member that is gone.
    """
    end = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > end:
            distributed_c10d._abort_process_group(group)
            raise RuntimeError(f"a broadcast of weights did not end within {timeout:g} s; its group is given up")
        time.sleep(POLL_SECONDS)


@contextmanager
def _errors_left_to_the_owner() -> Iterator[None]:
    before = os.environ.get(ASYNC_ERROR_HANDLING)
    os.environ[ASYNC_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ASYNC_ERROR_HANDLING]
        else:
            os.environ[ASYNC_ERROR_HANDLING] = before
