"""Runs a function on several ranks, each a process of its own, joined by gloo as torchrun's would be.

The ranks stay for the next job of as many ranks: to fork, to meet and to join costs more than most jobs do.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tests.ports import free_port
from tests.waiting import LIMIT_SECONDS
from trainer.model.ranks import join_ranks

# Ranks are forked off a server that has imported everything, which takes seconds, and computed nothing.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.trainer.rank_jobs"])

Pool = list[tuple[BaseProcess, Connection]]

_pools: dict[tuple[int, str | None], Pool] = {}
"""Each rank's process and the pipe to it, by the number of ranks and the GPUs that they may see."""


def run_on_ranks(world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``job(ranks, *arguments)`` of every rank, by rank.

    Raises:
        AssertionError: a rank failed, with its traceback, did not end within the deadline, or left the process in
            another state than it was in.
    """
    kind = world_size, os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind not in _pools:
        _pools[kind] = _started(*kind)
    pool = _pools[kind]
    deadline = time.monotonic() + LIMIT_SECONDS
    for _, pipe in pool:
        pipe.send((job, arguments))
    replies = [_receive(rank, pipe, deadline) for rank, (_, pipe) in enumerate(pool)]
    failures = [f"rank {rank}:\n{reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if failures:
        # The others may wait for the one that failed.
        for process, pipe in _pools.pop(kind):
            process.kill()
            process.join()
            pipe.close()
    assert not failures, "\n".join(failures)
    return [reply["value"] for reply in replies]


def _started(world_size: int, gpus: str | None) -> Pool:
    variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    pool: Pool = []
    for rank in range(world_size):
        here, there = _CONTEXT.Pipe()
        own = {**os.environ, **variables} | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _CONTEXT.Process(target=_rank, args=(there, own), daemon=True)
        process.start()
        there.close()
        pool.append((process, here))
    return pool


def _receive(rank: int, pipe: Connection, deadline: float) -> dict[str, Any]:
    if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
        return {"error": f"no answer within {LIMIT_SECONDS:g} s"}
    try:
        reply: dict[str, Any] = pipe.recv()
    except (EOFError, ConnectionResetError):
        return {"error": f"rank {rank} died without a word"}
    return reply


def _rank(pipe: Connection, variables: dict[str, str]) -> None:
    """Run jobs until one fails, or the other end of the pipe is closed."""
    # The server may have been started by a test that had variables of its own.
    os.environ.clear()
    os.environ.update(variables)
    try:
        with join_ranks() as ranks:
            before = _state()
            while True:
                try:
                    job, arguments = pipe.recv()
                except EOFError:
                    return
                torch.manual_seed(0)
                value = job(ranks, *arguments)
                assert _state() == before, f"{job.__name__} leaves {_state()} instead of {before}"
                pipe.send({"value": value})
    except Exception:  # noqa: BLE001  (whatever it is, the test shows it)
        pipe.send({"error": traceback.format_exc()})


def _state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "type": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }
