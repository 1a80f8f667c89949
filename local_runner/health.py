"""Requests to the components of a run: whether a node is up, and which phase the trainer is in."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from services.run_page.activity import in_words
from services.run_page.components import health_of

REQUEST_SECONDS = 3.0

UP = "up"
BUSY = "busy"
SILENT = "silent"


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer's phase, number of steps and activity, from its /stats."""

    phase: str
    total_steps: int
    doing: str = ""
    """The activity in words."""
    since: float = 0.0
    """When it began, in seconds since 1970."""


def client(token: str | None = None) -> httpx.AsyncClient:
    """Return a client of a run's components with a connection for each request, because components may restart."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False, headers=headers)


async def state(http: httpx.AsyncClient, address: str) -> str:
    """Return ``up``, or the status that a component's /health gives if it answers another code than 200.

    A component that listens and does not answer within REQUEST_SECONDS is ``busy``, as the trainer may be during a
    step. A component that cannot be reached is ``silent``.
    """
    try:
        response = await http.get(f"http://{address}/health")
    except httpx.ReadTimeout:
        return BUSY
    except httpx.TransportError:
        return SILENT
    return UP if response.status_code == httpx.codes.OK else health_of(response)[0]


async def trainer_status(http: httpx.AsyncClient, address: str) -> TrainerStatus | None:
    """Return the trainer's status; None while the trainer does not answer."""
    try:
        response = (await http.get(f"http://{address}/stats")).raise_for_status()
    except httpx.HTTPError:
        return None
    stats = response.json()
    activity = stats["activity"]
    return TrainerStatus(stats["phase"], stats["total_steps"], in_words(activity), activity["since"])
