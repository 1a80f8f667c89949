"""Plays on discovered servers: begins episodes there, asks a policy for actions, and sends them back.

Episodes on the replicas of a service begin through the service's load balancer, one a request, because SkyServe's
autoscaler counts these requests. The reply says which replica has the episode, and the actions go there directly.

A server that pushes is left to do so. A server that cannot be reached, or breaks the protocol, loses its running
episodes and is tried again; the other servers are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.evaluation_head.policy import Decision, OverloadedError, Policy, StatesRefusedError
from services.evaluation_head.registry import Registry, Server
from services.evaluation_head.settings import HeadSettings
from services.http.client import HttpClient, RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import (
    CloseReply,
    CloseRequest,
    DiscoveredServer,
    EnvironmentInfo,
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
ENTRANCE_SECONDS = 5.0
"""Limit of one request to a load balancer with its retries."""
ENTRANCE_CLOSED_SECONDS = 30.0
"""Time during which episodes begin at the replicas directly after a load balancer did not answer."""


class Link:
    """The head's connection to one discovered server."""

    def __init__(
        self,
        server: Server,
        found: DiscoveredServer,
        settings: HeadSettings,
        policies: Mapping[str, Policy],
        registry: Registry,
        siblings: dict[str, Link],
    ) -> None:
        """Make a link; ``siblings`` has the links to all replicas of the service that are well, by instance."""
        assert found.url is not None
        self._server = server
        self._settings = settings
        self._policies = policies
        self._registry = registry
        self._siblings = siblings
        self._http = self._client(found.url, REQUEST_SECONDS)
        self._entrance = self._client(found.entrance, ENTRANCE_SECONDS) if found.entrance else None
        self._entrance_closed_until = 0.0
        self._episodes: dict[str, OngoingEpisode] = {}
        self._policy: Policy | None = None
        """The policy that plays; None until one fits."""
        self._begun = 0
        self._health_asked = 0.0

    def _client(self, url: str, seconds: float) -> HttpClient:
        return HttpClient(
            url,
            token=self._settings.token,
            service="environment-server",
            timeout=seconds,
            deadline=seconds,
            max_connections=8,
        )

    async def run(self) -> None:
        """Ask for the server's health, and play while the server is well, until cancelled."""
        async with self._http, self._entrance or contextlib.nullcontext():
            try:
                while True:
                    if not await self._is_well():
                        self._leave()
                    elif self._room() > 0 or self._episodes:
                        await self._drive()
                    await asyncio.sleep(PROBE_INTERVAL_SECONDS)
            finally:
                self._leave()

    def _leave(self) -> None:
        """Get no further episodes from other links."""
        for instance in [instance for instance, link in self._siblings.items() if link is self]:
            del self._siblings[instance]
        self._episodes.clear()

    async def _is_well(self) -> bool:
        """Ask for the server's health and record it; return whether the server can be played on."""
        server = self._server
        self._health_asked = time.monotonic()
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
        server.usage = health.usage
        if server.found is not ServerState.CONNECTED or health.pushing or server.is_heard:
            return False
        self._siblings[health.instance] = self
        return True

    def _room(self) -> int:
        """Return how many episodes may be begun now."""
        each, total = self._settings.head_drive_episodes, self._settings.head_drive_total
        links = set(self._siblings.values())
        # A load balancer may give one replica more episodes than another.
        room = min(each - len(self._episodes), each * len(links) - sum(len(link._episodes) for link in links))
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
        while True:
            if (room := self._room()) > 0:
                await self._begin_many(room)
            if self._policy is None or not self._episodes:
                return
            try:
                await self._advance(self._policy)
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)
            if time.monotonic() - self._health_asked > PROBE_INTERVAL_SECONDS:
                await self._note_usage()

    async def _begin_many(self, count: int) -> None:
        """Begin ``count`` episodes; through a load balancer one a request, so that they spread over the replicas."""
        if self._entrance is None:
            await self._begin(count)
            return
        for result in await asyncio.gather(*(self._begin(1) for _ in range(count)), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _begin(self, count: int) -> None:
        """Begin episodes at the server, or at the replica of its service that the load balancer chooses.

        Raises:
            DependencyLostError, RequestRefusedError: the server begins none.
        """
        request = ResetRequest(episodes=count, seed=self._begun % 2**31, request_id=uuid.uuid4().hex)
        self._begun += count
        try:
            reply = await self._enter(request)
            link = self if reply is None else self._siblings[reply.instance]
            reply = reply or await self._http.call("POST", "/reset", ResetReply, request)
            begun = {start.episode: OngoingEpisode(start.episode, start.seed, start.state) for start in reply.episodes}
            if len(reply.episodes) != count or len(begun.keys() - link._episodes.keys()) != count:
                raise DependencyLostError(f"{count} episodes were asked for, /reset gave others")
        except BaseException:
            self._begun -= count
            raise
        link._policy = link._fitting(reply.environment)
        if link._policy is None:
            self._begun -= count
            await link._close(begun)
        else:
            link._episodes |= begun

    async def _enter(self, request: ResetRequest) -> ResetReply | None:
        """Return the reply of a replica that the load balancer chose; None where the server must be asked directly."""
        if self._entrance is None or time.monotonic() < self._entrance_closed_until:
            return None
        try:
            reply = await self._entrance.call("POST", "/reset", ResetReply, request)
        except (DependencyLostError, RequestRefusedError) as error:
            log.warning("the load balancer begins no episode; its replicas are asked", error=str(error))
            self._entrance_closed_until = time.monotonic() + ENTRANCE_CLOSED_SECONDS
            return None
        # A replica that is not connected yet drops the episode when nobody steps it.
        return reply if reply.instance in self._siblings else None

    def _fitting(self, environment: EnvironmentInfo) -> Policy | None:
        """Return the first policy that fits the environment; None where none does, and the server's detail says why."""
        if environment.seats > 1:
            self._server.detail = f"{environment.id} has {environment.seats} seats; the head plays environments of one"
            return None
        misfits = []
        for policy in self._policies.values():
            if (misfit := policy.misfit(environment)) is None:
                return policy
            misfits.append(misfit)
        self._server.detail = "; ".join(misfits)
        return None

    async def _note_usage(self) -> None:
        """Ask a server that is played on for its cores and memory."""
        self._health_asked = time.monotonic()
        with contextlib.suppress(DependencyLostError, ValidationError):
            response = await self._http.send_once("GET", "/health", seconds=PROBE_SECONDS)
            self._server.usage = EnvironmentServerHealth.model_validate_json(response.content).usage

    async def _advance(self, policy: Policy) -> None:
        """Take one action in every episode.

        Raises:
            ProblemError: the policy gave no actions; after OverloadedError nothing was done.
            DependencyLostError: the server does not answer, or breaks the protocol.
        """
        episodes, decisions = await self._decide(policy, list(self._episodes.values()))
        self._registry.played(self._server, policy.name, [episode.position for episode in episodes], len(episodes))
        steps = [episode.step_with(made.action) for episode, made in zip(episodes, decisions, strict=True)]
        reply = await self._http.call("POST", "/step", StepReply, StepRequest.model_construct(steps=steps))
        if [result.episode for result in reply.results] != [episode.episode for episode in episodes]:
            raise DependencyLostError("/step answered for other episodes than it was asked for")
        for episode, result in zip(episodes, reply.results, strict=True):
            self._take(episode, result, policy)

    async def _decide(
        self, policy: Policy, episodes: Sequence[OngoingEpisode]
    ) -> tuple[list[OngoingEpisode], list[Decision]]:
        """Return the episodes with their decisions; give up those whose state the policy refuses.

        Raises:
            ProblemError: the policy gave no actions, or refuses all states; after OverloadedError nothing was done.
        """
        try:
            return list(episodes), await policy.act([episode.state for episode in episodes])
        except StatesRefusedError as error:
            if len(episodes) == 1:
                raise
            refusal = error
        # One state, such as a conversation that has grown too long, must not cost the other episodes.
        answers = await asyncio.gather(*(policy.act([e.state]) for e in episodes), return_exceptions=True)
        taken: list[OngoingEpisode] = []
        refused: list[str] = []
        decisions: list[Decision] = []
        for episode, answer in zip(episodes, answers, strict=True):
            if isinstance(answer, StatesRefusedError):
                refusal = answer
                refused.append(episode.episode)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                taken.append(episode)
                decisions += answer
        if not taken:
            raise refusal
        for episode_id in refused:
            self._give_up(episode_id, refusal.detail)
        await self._close(refused)
        return taken, decisions

    def _give_up(self, episode: str, reason: str | None) -> None:
        self._server.detail = f"an episode was given up: {reason}"
        self._registry.lose(self._server, [episode])
        del self._episodes[episode]

    def _take(self, episode: OngoingEpisode, result: StepResult, policy: Policy) -> None:
        if result.status in (StepStatus.LOST, StepStatus.REFUSED):
            self._give_up(episode.episode, result.detail)
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
        self._links: dict[str, tuple[DiscoveredServer, asyncio.Task[None]]] = {}
        self._services: defaultdict[str, dict[str, Link]] = defaultdict(dict)
        """The links to the replicas of each service that are well, by instance; by the service's load balancer."""

    def update(self, found: list[DiscoveredServer]) -> None:
        """Connect to new servers, and drop the links to servers that vanished or moved."""
        wanted = {server.name: server for server in found if server.url is not None}
        for name, (old, task) in list(self._links.items()):
            if name not in wanted or (wanted[name].url, wanted[name].entrance) != (old.url, old.entrance):
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
            siblings = self._services[server.entrance] if server.entrance else {}
            link = Link(record, server, self._settings, self._policies, self._registry, siblings)
            task = asyncio.create_task(link.run())
            task.add_done_callback(_log_failure)
            self._links[name] = (server, task)

    async def close(self) -> None:
        """Drop all links."""
        tasks = [task for _, task in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the link to a server broke", error=repr(error))
