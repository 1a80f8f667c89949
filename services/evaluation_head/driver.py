"""Plays on discovered servers: begins episodes there, asks a policy for actions, and sends them back.

A server that pushes by itself is left to do so. One that cannot be reached, or answers what it was not asked, loses its
running episodes and is tried again; the others do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from pydantic import ValidationError

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.evaluation_head.policy import OverloadedError, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.registry import Accounts, Server, TooManyServersError
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.statistics import Meter
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.evaluation import (
    Action,
    CloseReply,
    CloseRequest,
    DiscoveredServer,
    EnvironmentServerHealth,
    EpisodePosition,
    FinishedEpisode,
    OngoingEpisode,
    ResetReply,
    ResetRequest,
    ServerMode,
    ServerState,
    State,
    StepItem,
    StepReply,
    StepRequest,
    StepResult,
    StepStatus,
)

log = get_logger(__name__)

PROBE_TIMEOUT = 5.0
REQUEST_SECONDS = 60.0
"""For one request with its retries: a server that is away for less keeps its episodes."""


class ServerMisbehavedError(Exception):
    """The server answered something else than it was asked."""


class Link:
    """The head's connection to one discovered server."""

    def __init__(
        self,
        server: Server,
        settings: HeadSettings,
        policies: Mapping[str, Policy],
        accounts: Accounts,
        meter: Meter,
    ) -> None:
        assert server.url is not None
        self.url = server.url
        self._server = server
        self._settings = settings
        self._policies = policies
        self._accounts = accounts
        self._meter = meter
        self._http = HttpClient(
            server.url,
            token=settings.token,
            service="environment-server",
            timeout=REQUEST_SECONDS,
            deadline=REQUEST_SECONDS,
            max_connections=8,
        )
        self._plays: dict[str, OngoingEpisode] = {}
        self._begun = 0
        self._instance: str | None = None
        self._policy: Policy | None = None

    async def run(self) -> None:
        """Until cancelled: asks for the server's health, and plays while it can."""
        try:
            async with self._http:
                while True:
                    health = await self._probe()
                    if health is not None and self._may_drive(health):
                        await self._drive()
                    await asyncio.sleep(self._settings.head_probe_seconds)
        finally:
            self._give_up_plays()

    async def _probe(self) -> EnvironmentServerHealth | None:
        """The server's health; None when it is not well."""
        server, started = self._server, time.monotonic()
        try:
            response = await self._http.send_once("GET", "/health", seconds=PROBE_TIMEOUT)
            health = EnvironmentServerHealth.model_validate_json(response.content)
        except DependencyLostError as error:
            server.found, server.detail, server.milliseconds = ServerState.UNREACHABLE, str(error), None
            return None
        except ValidationError:
            is_starting = response.status_code == 503
            server.found = ServerState.STARTING if is_starting else ServerState.UNREACHABLE
            server.detail = None if is_starting else f"{self.url} is no environment server (/health)"
            return None
        server.milliseconds = round(1000 * (time.monotonic() - started), 1)
        server.found = ServerState.CONNECTED if response.status_code == 200 else ServerState.STARTING
        server.environment = health.environment
        server.detail = None
        if self._instance not in (None, health.instance):
            self._give_up_plays()
        self._instance = health.instance
        self._accounts.identify(server, health.instance)
        return health if response.status_code == 200 else None

    def _may_drive(self, health: EnvironmentServerHealth) -> bool:
        server = self._server
        if health.pushing or self._accounts.state_of(server) is not ServerState.CONNECTED:
            return False
        if server.mode is ServerMode.PUSHING and server.instance == health.instance and self._is_heard():
            return False
        twin = self._accounts.twin(server, health.instance)
        # The same server at two addresses is played on once.
        if twin is not None and twin.mode is ServerMode.DRIVEN:
            server.detail = f"the same server as {twin.name}"
            return False
        return self._settings.head_drive == "on" and self._left() > 0

    def _is_heard(self) -> bool:
        return time.monotonic() - self._server.heard <= self._settings.head_silent_seconds

    def _left(self) -> int:
        total = self._settings.head_drive_total
        return self._settings.head_drive_episodes if total is None else total - self._begun

    async def _drive(self) -> None:
        """Plays until there is nothing left to play, or the server fails."""
        server = self._server
        server.mode = ServerMode.DRIVEN
        try:
            while True:
                await self._fill()
                if self._policy is None or not self._plays:
                    return
                await self._advance(self._policy)
        except (DependencyLostError, RequestRefusedError) as error:
            server.found, server.detail = ServerState.UNREACHABLE, str(error)
            log.warning("a server is lost", server=server.name, error=str(error))
        except (ServerMisbehavedError, PolicyFailedError, StatesRefusedError) as error:
            server.detail = str(error)
            log.warning("playing was broken off", server=server.name, error=str(error))
            await self._close(self._plays)
        finally:
            server.mode = ServerMode.IDLE
            self._give_up_plays()

    async def _fill(self) -> None:
        """Begins as many episodes as there is room for, and chooses the policy that plays them."""
        count = min(self._settings.head_drive_episodes - len(self._plays), self._left())
        if count <= 0:
            return
        seed = (self._settings.head_drive_seed + self._begun) % 2**31
        request = ResetRequest(episodes=count, seed=seed, request_id=uuid.uuid4().hex)
        reply = await self._http.call("POST", "/reset", ResetReply, request)
        if len({e.episode for e in reply.episodes} - set(self._plays)) != count or len(reply.episodes) != count:
            raise ServerMisbehavedError(f"{count} episodes were asked for, /reset gave others")
        self._policy = self._choose(reply)
        if self._policy is None:
            await self._close([e.episode for e in reply.episodes])
            return
        self._begun += count
        self._plays |= {e.episode: OngoingEpisode(e.episode, e.seed, e.state) for e in reply.episodes}

    def _choose(self, reply: ResetReply) -> Policy | None:
        wanted = self._settings.head_drive_policy
        candidates = [self._policies[wanted]] if wanted else list(self._policies.values())
        misfits = [(policy, policy.misfit(reply.environment)) for policy in candidates]
        chosen = next((policy for policy, misfit in misfits if misfit is None), None)
        if chosen is None:
            self._server.detail = "; ".join(str(misfit) for _, misfit in misfits)
        return chosen

    async def _advance(self, policy: Policy) -> None:
        """One action in every episode."""
        plays = list(self._plays.values())
        decisions = await self._decide(policy, [play.state for play in plays])
        positions = [
            EpisodePosition.model_construct(episode=p.episode, step=p.steps, episode_return=p.episode_return)
            for p in plays
        ]
        self._accounts.played(self._server, policy.name, len(plays), positions)
        self._meter.played(len(plays))
        items = [
            StepItem.model_construct(episode=play.episode, step=play.steps, action=action)
            for play, action in zip(plays, decisions, strict=True)
        ]
        reply = await self._http.call("POST", "/step", StepReply, StepRequest.model_construct(steps=items))
        if [result.episode for result in reply.results] != [play.episode for play in plays]:
            raise ServerMisbehavedError("/step answered for other episodes than it was asked for")
        for play, result in zip(plays, reply.results, strict=True):
            self._take(play, result, policy)
        endless = [p.episode for p in self._plays.values() if p.steps >= self._settings.head_max_episode_steps]
        if endless:
            log.warning("episodes without end were given up", server=self._server.name, episodes=len(endless))
            self._server.detail = f"{len(endless)} episodes did not end within HEAD_MAX_EPISODE_STEPS"
            await self._close(endless)

    async def _decide(self, policy: Policy, states: list[State]) -> list[Action]:
        while True:
            try:
                return [decision.action for decision in await policy.act(states)]
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)

    def _take(self, play: OngoingEpisode, result: StepResult, policy: Policy) -> None:
        if result.status is StepStatus.LOST or result.status is StepStatus.REFUSED:
            self._server.detail = f"an episode was given up: {result.detail}"
            self._accounts.lose(self._server, [play.episode])
            del self._plays[play.episode]
            return
        total = play.episode_return + result.reward
        if result.steps != play.steps + 1 or not math.isfinite(total) or result.state is None:
            raise ServerMisbehavedError(f"/step counts {result.steps} steps after {play.steps}, or gives no state")
        play.steps, play.episode_return, play.state = result.steps, total, result.state
        if result.status is not StepStatus.RUNNING:
            del self._plays[play.episode]
            report = FinishedEpisode.model_construct(
                episode=play.episode, steps=play.steps, episode_return=total, seed=play.seed
            )
            self._accounts.finish(self._server, report, policy.name)

    async def _close(self, episodes: Iterable[str]) -> None:
        """Ends episodes on the server, as far as it is still there, and here."""
        ids = list(episodes)
        with contextlib.suppress(DependencyLostError, RequestRefusedError):
            await self._http.call("POST", "/close", CloseReply, CloseRequest(episodes=ids), deadline=PROBE_TIMEOUT)
        self._accounts.lose(self._server, ids)
        for episode in ids:
            self._plays.pop(episode, None)

    def _give_up_plays(self) -> None:
        self._accounts.lose(self._server, list(self._plays))
        self._plays.clear()


class Driver:
    """The links to all discovered servers."""

    def __init__(
        self, settings: HeadSettings, policies: Mapping[str, Policy], accounts: Accounts, meter: Meter
    ) -> None:
        self._settings = settings
        self._policies = policies
        self._accounts = accounts
        self._meter = meter
        self._links: dict[str, tuple[str, asyncio.Task[None]]] = {}

    def update(self, found: list[DiscoveredServer]) -> None:
        """Connects to new servers and lets go of those that vanished or moved."""
        wanted = {server.name: server for server in found if server.url is not None}
        for name, (url, task) in list(self._links.items()):
            if name not in wanted or wanted[name].url != url:
                task.cancel()
                del self._links[name]
                if name not in wanted:
                    task.add_done_callback(self._forget(name))
        for name, server in wanted.items():
            if name in self._links:
                continue
            assert server.url is not None
            try:
                account = self._accounts.discovered(name, server.url, server.source)
            except TooManyServersError as error:
                log.warning("a discovered server is left out", server=name, error=str(error))
                continue
            link = Link(account, self._settings, self._policies, self._accounts, self._meter)
            task = asyncio.create_task(link.run())
            task.add_done_callback(_log_failure)
            self._links[name] = (server.url, task)

    def _forget(self, name: str) -> Callable[[asyncio.Task[None]], None]:
        def forget(_task: asyncio.Task[None]) -> None:
            if name not in self._links:
                self._accounts.vanished(name)

        return forget

    async def close(self) -> None:
        """Lets go of all servers."""
        tasks = [task for _, task in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the link to a server broke", error=repr(error))
