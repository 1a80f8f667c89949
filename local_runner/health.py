"""Asks the components over HTTP whether they are up, and the trainer what it is doing, for the live view."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from local_runner.environment import Run
from services.core import endpoints
from services.core.endpoints import Task

POLL_SECONDS = 1.0
REQUEST_SECONDS = 5.0

# The port of each task whose /health stands for the node. Rank 0 of a rollout-server is up when its router is.
_PORTS = {
    Task.DATA_SERVER: endpoints.DATA_PORT,
    Task.REWARD_SERVER: endpoints.REWARD_PORT,
    Task.REPLAY_BUFFER: endpoints.REPLAY_PORT,
    Task.TRAINER: endpoints.STATUS_PORT,
}


@dataclass(frozen=True)
class TrainerStatus:
    """What the trainer says of itself."""

    phase: str
    step: int
    total_steps: int


def health_url(run: Run, task: str, rank: int) -> str | None:
    """Where node ``rank`` of ``task`` tells its health; None for a node that does not."""
    if task == Task.ROLLOUT_SERVER:
        port = endpoints.ROUTER_PORT if rank == 0 else endpoints.ENGINE_PORT
    elif task == Task.TRAINER and rank > 0:
        return None
    elif task in _PORTS:
        port = _PORTS[Task(task)]
    else:
        return None
    return f"http://{run.addresses.find(task, rank, port)}/health"


async def watch(run: Run, report: Callable[[str, int, bool], None]) -> None:
    """Calls ``report(task, rank, is_up)`` for every node that tells, again and again, until cancelled."""
    urls = {
        (task.name, rank): url
        for task in run.group.tasks
        for rank in range(task.num_nodes)
        if (url := health_url(run, task.name, rank)) is not None
    }
    # A component that restarts gets a fresh connection.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as client:

        async def ask(task: str, rank: int, url: str) -> None:
            try:
                response = await client.get(url)
            except httpx.TransportError:
                report(task, rank, False)
            else:
                report(task, rank, response.status_code == httpx.codes.OK)

        while True:
            await asyncio.gather(*(ask(task, rank, url) for (task, rank), url in urls.items()))
            await asyncio.sleep(POLL_SECONDS)


async def watch_trainer(run: Run, report: Callable[[TrainerStatus], None]) -> None:
    """Calls ``report`` with what the trainer is doing, again and again, until cancelled."""
    trainer = next((task for task in run.group.tasks if task.name == Task.TRAINER), None)
    if trainer is None:
        return
    url = f"http://{run.addresses.find(trainer.name, 0, endpoints.STATUS_PORT)}/stats"
    token = trainer.environment.get("JOBGROUP_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False, headers=headers) as client:
        while True:
            try:
                response = await client.get(url)
            except httpx.TransportError:
                pass  # not up, or not any more
            else:
                if response.status_code == httpx.codes.OK:
                    stats = response.json()
                    report(TrainerStatus(stats["phase"], stats["step"], stats["total_steps"]))
            await asyncio.sleep(POLL_SECONDS)
