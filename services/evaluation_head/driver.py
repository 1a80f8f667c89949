"""Plays on discovered servers: begins episodes there, asks a policy for actions, and sends them back.

A server that pushes is left to do so. A server that cannot be reached, or breaks the protocol, loses its running
episodes and is tried again; the other servers are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.evaluation_head.policy import OverloadedError, Policy
from services.evaluation_head.registry import Registry, Server
from services.evaluation_head.settings import HeadSettings
from services.http.client import HttpClient, RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import (
    CloseReply,
    CloseRequest,
    DiscoveredServer,
    EnvironmentServerHealth,
    OngoingEpisode,
    ResetReply,
    ResetRequest,
    ServerMode,
    ServerState,
    StepReply,
    StepRequest,
    StepResult,
    StepStatus,
)

log = get_logger(__name__)

PROBE_INTERVAL_SECONDS = 5.0
"""Time between two questions for a server's health while the head does not play on it."""
PROBE_SECONDS = 5.0
"""Limit of an answer to a question for health, and to closing episodes."""
REQUEST_SECONDS = 60.0
"""Limit of one request with its retries: a server that is away for less keeps its episodes."""


class Link:
    """The head's connection to one discovered server."""

    def __init__(
        self, server: Server, url: str, settings: HeadSettings, policies: Mapping[str, Policy], registry: Registry
    ) -> None:
        self._server = server
        self._settings = settings
        self._policies = policies
        self._registry = registry
        self._http = HttpClient(
            url,
            token=settings.token,
            service="environment-server",
            timeout=REQUEST_SECONDS,
            deadline=REQUEST_SECONDS,
            max_connections=8,
        )
        self._episodes: dict[str, OngoingEpisode] = {}
        self._begun = 0

    async def run(self) -> None:
        """Ask for the server's health, and play while the server is well, until cancelled."""
        async with self._http:
            while True:
                if await self._is_well() and self._room() > 0:
                    await self._drive()
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)

    async def _is_well(self) -> bool:
        """Ask for the server's health and record it; return whether the server can be played on."""
        server = self._server
        try:
            response = await self._http.send_once("GET", "/health", seconds=PROBE_SECONDS)
            health = EnvironmentServerHealth.model_validate_json(response.content)
        except DependencyLostError as error:
            server.found, server.detail = ServerState.UNREACHABLE, str(error)
            return False
        except ValidationError:
            # A server that starts does not tell its environment yet.
            is_starting = response.status_code == 503
            server.found = ServerState.STARTING if is_starting else ServerState.UNREACHABLE
            server.detail = None if is_starting else f"{self._http.url} is no environment server (/health)"
            return False
        server.found = ServerState.CONNECTED if response.status_code == 200 else ServerState.STARTING
        server.environment = health.environment
        server.detail = f"plays by itself, as {health.name}" if health.pushing else None
        return server.found is ServerState.CONNECTED and not (health.pushing or server.is_heard)

    def _room(self) -> int:
        """Return how many episodes may be begun now."""
        room = self._settings.head_drive_episodes - len(self._episodes)
        total = self._settings.head_drive_total
        return room if total is None else min(room, total - self._begun)

    async def _drive(self) -> None:
        """Play until there is nothing left to play, or the server or the policy fails."""
        server = self._server
        server.mode = ServerMode.DRIVEN
        try:
            await self._play()
        except (DependencyLostError, RequestRefusedError, ProblemError) as error:
            server.detail = error.detail if isinstance(error, ProblemError) else str(error)
            log.warning("playing was broken off", server=server.name, error=server.detail)
            await self._close(self._episodes)
        finally:
            server.mode = ServerMode.IDLE
            self._registry.lose(server, list(self._episodes))
            self._episodes.clear()

    async def _play(self) -> None:
        policy: Policy | None = None
        while True:
            if self._room() > 0:
                policy = await self._begin(self._room())
            if policy is None or not self._episodes:
                return
            try:
                await self._advance(policy)
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)

    async def _begin(self, count: int) -> Policy | None:
        """Begin episodes and return the policy that plays them; None where no policy fits the environment."""
        request = ResetRequest(episodes=count, seed=self._begun % 2**31, request_id=uuid.uuid4().hex)
        reply = await self._http.call("POST", "/reset", ResetReply, request)
        begun = {start.episode: OngoingEpisode(start.episode, start.seed, start.state) for start in reply.episodes}
        if len(reply.episodes) != count or len(begun.keys() - self._episodes.keys()) != count:
            raise DependencyLostError(f"{count} episodes were asked for, /reset gave others")
        if (seats := reply.environment.seats) > 1:
            self._server.detail = f"{reply.environment.id} has {seats} seats; the head plays environments of one"
            await self._close(begun)
            return None
        misfits = [policy.misfit(reply.environment) for policy in self._policies.values()]
        if None not in misfits:
            self._server.detail = "; ".join(map(str, misfits))
            await self._close(begun)
            return None
        self._begun += count
        self._episodes |= begun
        return list(self._policies.values())[misfits.index(None)]

    async def _advance(self, policy: Policy) -> None:
        """Take one action in every episode.

        Raises:
            ProblemError: the policy gave no actions; after OverloadedError nothing was done.
            DependencyLostError: the server does not answer, or breaks the protocol.
        """
        episodes = list(self._episodes.values())
        decisions = await policy.act([episode.state for episode in episodes])
        self._registry.played(self._server, policy.name, [episode.position for episode in episodes], len(episodes))
        steps = [episode.step_with(made.action) for episode, made in zip(episodes, decisions, strict=True)]
        reply = await self._http.call("POST", "/step", StepReply, StepRequest.model_construct(steps=steps))
        if [result.episode for result in reply.results] != [episode.episode for episode in episodes]:
            raise DependencyLostError("/step answered for other episodes than it was asked for")
        for episode, result in zip(episodes, reply.results, strict=True):
            self._take(episode, result, policy)

    def _take(self, episode: OngoingEpisode, result: StepResult, policy: Policy) -> None:
        if result.status in (StepStatus.LOST, StepStatus.REFUSED):
            self._server.detail = f"an episode was given up: {result.detail}"
            self._registry.lose(self._server, [episode.episode])
            del self._episodes[episode.episode]
            return
        total = episode.episode_return + result.reward
        if result.steps != episode.steps + 1 or not math.isfinite(total) or result.state is None:
            raise DependencyLostError(f"/step counts {result.steps} steps after {episode.steps}, or gives no state")
        episode.follow(result)
        if result.status is not StepStatus.RUNNING:
            del self._episodes[episode.episode]
            self._registry.finish(self._server, episode.report, policy.name)

    async def _close(self, episodes: Iterable[str]) -> None:
        """End episodes on the server, if it is still there."""
        request = CloseRequest(episodes=list(episodes))
        with contextlib.suppress(DependencyLostError, RequestRefusedError):
            await self._http.call("POST", "/close", CloseReply, request, deadline=PROBE_SECONDS)


class Driver:
    """The links to all discovered servers."""

    def __init__(self, settings: HeadSettings, policies: Mapping[str, Policy], registry: Registry) -> None:
        self._settings = settings
        self._policies = policies
        self._registry = registry
        self._links: dict[str, tuple[str, asyncio.Task[None]]] = {}

    def update(self, found: list[DiscoveredServer]) -> None:
        """Connect to new servers, and drop the links to servers that vanished or moved."""
        wanted = {server.name: server for server in found if server.url is not None}
        for name, (url, task) in list(self._links.items()):
            if name not in wanted or wanted[name].url != url:
                task.cancel()
                del self._links[name]
                if name not in wanted:
                    self._registry.vanished(name)
        for name, server in wanted.items():
            if name in self._links or server.url is None:
                continue
            try:
                record = self._registry.discovered(name, server.url)
            except ProblemError as error:
                log.warning("a discovered server is left out", server=name, error=error.detail)
                continue
            link = Link(record, server.url, self._settings, self._policies, self._registry)
            task = asyncio.create_task(link.run())
            task.add_done_callback(_log_failure)
            self._links[name] = (server.url, task)

    async def close(self) -> None:
        """Drop all links."""
        tasks = [task for _, task in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the link to a server broke", error=repr(error))
