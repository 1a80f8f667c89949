"""Requests to the components of a run: whether a node is up, and which phase the trainer is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from services.core.endpoints import ENGINE_PORT, PORTS, Task
from services.run_page.components import health_of

REQUEST_SECONDS = 3.0

UP = "up"


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer's phase and number of steps, from its /stats."""

    phase: str
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
    # Of the trainer only the first rank listens.
    if task not in set(Task) or not PORTS[Task(task)] or (task == Task.TRAINER and rank != "0"):
        return None
    # The first rollout node is up once its router is.
    port = ENGINE_PORT if task == Task.ROLLOUT_SERVER and rank != "0" else PORTS[Task(task)][0]
    return addresses.get(f"{node}:{port}")


def trainer_address(addresses: Mapping[str, str]) -> str | None:
    """Return the ``host:port`` of the trainer's status page; None in a run without a trainer."""
    return health_address(addresses, f"{Task.TRAINER.value}-0")


async def state(http: httpx.AsyncClient, address: str) -> str:
    """Return ``up``, ``silent``, or the status that a component's /health gives if it answers another code than 200."""
    try:
        response = await http.get(f"http://{address}/health")
    except httpx.TransportError:
        return "silent"
    return UP if response.status_code == httpx.codes.OK else health_of(response)[0]


async def trainer_status(http: httpx.AsyncClient, address: str) -> TrainerStatus | None:
    """Return the trainer's status; None while the trainer does not answer."""
    try:
        response = (await http.get(f"http://{address}/stats")).raise_for_status()
    except httpx.HTTPError:
        return None
    stats = response.json()
    return TrainerStatus(stats["phase"], stats["total_steps"])
