"""The head that gives the actions: one that runs already, or one that is started here; and the checks before a run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from evaluation.trajectories.arenas import Arena, Step
from services.clients.evaluation_head import EvaluationHeadClient
from services.core.errors import ConfigurationError, DependencyLostError
from services.environment_server.environments import ActionRefusedError
from services.http.client import HttpClient, RequestRefusedError, problem_detail
from services.http.server import listen
from services.rollout_server.commands import Command
from services.rollout_server.supervisor import SupervisedProcess

SERVICE = "evaluation-head"
MAX_RESTARTS = 3
START_SECONDS = 300.0
"""A head loads torch and its policies."""
HANG_SECONDS = 60.0
PROBE_SECONDS = 10.0
ACTION_SECONDS = 120.0


@dataclass(frozen=True)
class HeadAt:
    """A head's address, and what must go on while the head is used."""

    url: str
    watch: Callable[[], Awaitable[None]]
    """Raises an error once a head that was started here has failed for good."""


async def _forever() -> None:
    await asyncio.Event().wait()


def running_head(url: str) -> HeadAt:
    """Return the head at an address.

    Raises:
        ConfigurationError: that is no URL of a server.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"--eval-head-url is {url!r}; needed is a URL such as http://127.0.0.1:8080")
    return HeadAt(url.rstrip("/"), _forever)


@asynccontextmanager
async def started_head(policies: str, port: int, batch_size: int) -> AsyncIterator[HeadAt]:
    """Start a head with policies on a port of this machine (0: any free one); end it with the context.

    Raises:
        ConfigurationError: the port is taken, or the head cannot start.
    """
    with listen("127.0.0.1", port) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    variables = {"HEAD_BATCH_SIZE": os.environ.get("HEAD_BATCH_SIZE") or str(batch_size)}
    variables |= {"LOG_LEVEL": os.environ.get("LOG_LEVEL") or "warning"}
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--policies", policies]
    command = Command(SERVICE, sys.executable, "services.evaluation_head", arguments, variables)
    async with HttpClient(url) as client:
        head = SupervisedProcess(
            command,
            client.is_healthy,
            max_restarts=MAX_RESTARTS,
            start_seconds=START_SECONDS,
            hang_seconds=HANG_SECONDS,
        )
        running = asyncio.create_task(head.run())
        try:
            healthy = asyncio.create_task(head.wait_until_healthy(0))
            await asyncio.wait({running, healthy}, return_when=asyncio.FIRST_COMPLETED)
            healthy.cancel()
            if running.done():
                await running
            yield HeadAt(url, lambda: asyncio.shield(running))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def check_head(head: HeadAt, policy: str | None, arena: Arena, token: str | None) -> str:
    """Check that a head has the policy, and that policy and environment fit; return the policy's name.

    The check plays the first step of an episode, since only this shows for every kind of policy that both fit.

    Raises:
        ConfigurationError: something does not fit; the message says what, in one line.
    """
    async with EvaluationHeadClient(
        head.url, policy=policy, environment=arena.info.id, token=token, deadline=ACTION_SECONDS
    ) as client:
        names = await _policies(client)
        if policy is not None and policy not in names:
            raise ConfigurationError(f"--policy is {policy!r}; the head at {head.url} has {', '.join(names)}")
        if arena.info.seats > 1:
            raise ConfigurationError(f"{arena.info.id} has {arena.info.seats} seats; the head plays those of one")
        [begun] = await arena.begin([0])
        if isinstance(begun, Exception):
            raise ConfigurationError(f"{arena.info.id} cannot be reset: {begun}") from begun
        handle, state = begun
        try:
            reply = await client.act([state])
            [outcome] = await arena.step([Step(handle, 0, reply.actions[0])])
        except RequestRefusedError as error:
            raise ConfigurationError(f"{arena.info.id} does not fit: {error.detail}") from error
        except DependencyLostError as error:
            raise ConfigurationError(f"the policy gives no action for {arena.info.id}: {error}") from error
        finally:
            await arena.end([handle])
        if isinstance(outcome, ActionRefusedError):
            raise ConfigurationError(f"policy {reply.policy!r} does not fit {arena.info.id}: {outcome}")
        return reply.policy


async def _policies(client: EvaluationHeadClient) -> list[str]:
    """Return the names of a head's policies.

    Raises:
        ConfigurationError: no head answers there, or it does not take the token.
    """
    try:
        # A head that loads its policies answers 503.
        health = await client.send_once("GET", "/health", seconds=PROBE_SECONDS)
        if health.status_code == 503:
            await client.wait_healthy(START_SECONDS)
        stats = await client.send_once("GET", "/stats", seconds=PROBE_SECONDS)
    except DependencyLostError as error:
        raise ConfigurationError(f"{error}; start a head there, or give another --eval-head-url") from error
    if stats.status_code != 200:
        raise ConfigurationError(
            f"--eval-head-url {client.url}: /stats answers {stats.status_code} {problem_detail(stats)}"
        )
    content: Any = {}
    try:
        content = stats.json()
        if content["service"] == SERVICE:
            return [policy["name"] for policy in content["policies"]]
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigurationError(f"--eval-head-url {client.url} is no evaluation head: /stats answers {stats.text[:100]!r}")
