"""Requests to the components of a run: whether a node is up, and which phase the trainer is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from local_runner.environment import Run
from services.core import endpoints
from services.core.endpoints import Task

POLL_SECONDS = 1.0
REQUEST_SECONDS = 5.0

_PORTS = {
    Task.DATA_SERVER: endpoints.DATA_PORT,
    Task.ROLLOUT_SERVER: endpoints.ENGINE_PORT,
    Task.REWARD_SERVER: endpoints.REWARD_PORT,
    Task.REPLAY_BUFFER: endpoints.REPLAY_PORT,
    Task.TRAINER: endpoints.STATUS_PORT,
}
"""The port of each task whose /health stands for the node."""


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer's phase and step, from its /stats."""

    phase: str
    step: int
    total_steps: int


def client(token: str | None = None) -> httpx.AsyncClient:
    """Return a client of a run's components, which connects anew for each request, as components may restart."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False, headers=headers)


def health_address(addresses: Mapping[str, str], node: str) -> str | None:
    """Return the ``host:port`` at which a node, such as ``reward-server-0``, answers /health; None if at none.

    Args:
        addresses: ``host:port`` by ``node:port``, as JOBGROUP_ENDPOINTS has it.
        node: task and rank.
    """
    task, _, rank = node.rpartition("-")
    # Only the trainer's first rank listens.
    if task not in _PORTS or (task == Task.TRAINER and rank != "0"):
        return None
    return addresses.get(f"{node}:{_PORTS[Task(task)]}")


def trainer_address(addresses: Mapping[str, str]) -> str | None:
    """Return the ``host:port`` of the trainer's status page; None in a run without a trainer."""
    return health_address(addresses, f"{Task.TRAINER.value}-0")


async def get(http: httpx.AsyncClient, address: str, path: str) -> httpx.Response | None:
    """Return the reply of a component, whatever its status; None if there is none."""
    try:
        return await http.get(f"http://{address}{path}")
    except httpx.TransportError:
        return None


async def trainer_status(http: httpx.AsyncClient, address: str) -> TrainerStatus | None:
    """Return the trainer's status; None while the trainer does not answer."""
    response = await get(http, address, "/stats")
    if response is None or response.status_code != httpx.codes.OK:
        return None
    stats = response.json()
    return TrainerStatus(stats["phase"], stats["step"], stats["total_steps"])


async def watch(run: Run, report: Callable[[str, int, bool], None]) -> None:
    """Call ``report(task, rank, is_up)`` for every node with a /health every POLL_SECONDS, until cancelled."""
    addresses = {
        (task.name, rank): address
        for task in run.group.tasks
        for rank in range(task.num_nodes)
        if (address := health_address(run.addresses.endpoints, f"{task.name}-{rank}")) is not None
    }
    if (Task.ROLLOUT_SERVER, 0) in addresses:
        # The first rollout node is up once its router is.
        addresses[Task.ROLLOUT_SERVER, 0] = run.addresses.find(Task.ROLLOUT_SERVER, 0, endpoints.ROUTER_PORT)
    async with client() as http:

        async def ask(task: str, rank: int, address: str) -> None:
            response = await get(http, address, "/health")
            report(task, rank, response is not None and response.status_code == httpx.codes.OK)

        while True:
            await asyncio.gather(*(ask(task, rank, address) for (task, rank), address in addresses.items()))
            await asyncio.sleep(POLL_SECONDS)


async def watch_trainer(run: Run, report: Callable[[TrainerStatus], None]) -> None:
    """Call ``report`` with the trainer's status every POLL_SECONDS, until cancelled."""
    address = trainer_address(run.addresses.endpoints)
    if address is None:
        return
    trainer = next(task for task in run.group.tasks if task.name == Task.TRAINER)
    async with client(trainer.environment.get("JOBGROUP_TOKEN")) as http:
        while True:
            if (status := await trainer_status(http, address)) is not None:
                report(status)
            await asyncio.sleep(POLL_SECONDS)
