"""Runs a function on several ranks, each a process of its own, joined by gloo as torchrun's would be."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.ports import free_port
from tests.waiting import LIMIT_SECONDS
from trainer.model.ranks import Ranks, join_ranks

# Ranks are forked off a server that has imported everything, which takes seconds, and computed nothing.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.trainer.rank_jobs"])


def run_on_ranks(world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``job(ranks, *arguments)`` of every rank, by rank.

    Raises:
        AssertionError: a rank failed, with its traceback, or did not end within the deadline.
    """
    port = free_port()
    started, pipes = [], []
    for rank in range(world_size):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(there, rank, world_size, port, job, arguments))
        process.start()
        there.close()
        started.append(process)
        pipes.append(here)
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        replies = [_receive(rank, pipe, deadline) for rank, pipe in enumerate(pipes)]
    finally:
        for process in started:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}:\n{reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    assert not failures, "\n".join(failures)
    return [reply["value"] for reply in replies]


def _receive(rank: int, pipe: Connection, deadline: float) -> dict[str, Any]:
    if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
        return {"error": f"no answer within {LIMIT_SECONDS:g} s"}
    try:
        reply: dict[str, Any] = pipe.recv()
    except EOFError:
        return {"error": f"rank {rank} died without a word"}
    return reply


def _rank(
    reply: Connection,
    rank: int,
    world_size: int,
    port: int,
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        with join_ranks() as ranks:
            value = _call(job, ranks, arguments)
        reply.send({"value": value})
    except Exception:  # noqa: BLE001  (whatever it is, the test shows it)
        reply.send({"error": traceback.format_exc()})


def _call(job: Callable[..., Any], ranks: Ranks, arguments: tuple[Any, ...]) -> Any:
    return job(ranks, *arguments)
