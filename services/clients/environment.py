"""The client of the job group's environment-servers: episodes, each on one of the servers.

An episode continues on another server when its server is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import socket
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import orjson
from prometheus_client import Counter

from services.core.endpoints import Endpoint, Task, endpoint, mapped_addresses
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import ServiceClient
from services.protocol.base import ComponentRecord
from services.protocol.evaluation import (
    Action,
    CloseReply,
    CloseRequest,
    EnvironmentInfo,
    EpisodeStart,
    OngoingEpisode,
    ResetReply,
    ResetRequest,
    StepItem,
    StepReply,
    StepRequest,
    StepResult,
    StepStatus,
)

log = get_logger(__name__)


ANSWER_SECONDS = 10.0
"""A server that has not answered a request for so long is asked for its health."""
FAILED_SECONDS = 10.0
"""A server that has failed is the last choice for so long."""
SEARCH_SECONDS = 10.0
"""Time between two searches for servers."""
PAUSE_SECONDS = 0.5
"""Pause before all servers, or a step at the same server, are tried again."""


REPLAYED = Counter("client_episodes_replayed", "Episodes whose server was lost and whose actions were taken again.")

CLOSE_SECONDS = 5.0
"""Longest wait for the end of an episode, which the server ends by itself when nobody steps it."""
MOST_LOSSES = 3
"""An action at which the episode was lost so often in a row is the cause."""


class EnvironmentServer(ServiceClient):
    """One environment-server. Repeating any of these requests does no harm."""

    task = Task.ENVIRONMENT_SERVER

    async def reset(self, request: ResetRequest, *, deadline: float | None = None) -> ResetReply:
        """Begin episodes; the reply has one for each that was asked for."""
        reply = await self.call("POST", "/reset", ResetReply, request, deadline=deadline)
        if len(reply.episodes) != request.episodes:
            raise DependencyLostError(f"{self.url} began {len(reply.episodes)} episodes instead of {request.episodes}")
        return reply

    async def step(self, items: Sequence[StepItem], *, deadline: float | None = None) -> list[StepResult]:
        """Take one action in each of some episodes; return one result an item, in order."""
        request = StepRequest.model_construct(steps=list(items))
        reply = await self.call("POST", "/step", StepReply, request, deadline=deadline)
        if [result.episode for result in reply.results] != [item.episode for item in items]:
            raise DependencyLostError(f"{self.url}/step answered for other episodes than it was asked for")
        return reply.results

    async def end(self, episodes: Sequence[str], *, deadline: float | None = None) -> CloseReply:
        """End episodes early."""
        request = CloseRequest(episodes=list(episodes))
        return await self.call("POST", "/close", CloseReply, request, deadline=deadline)


class EnvironmentClient:
    """All environment-servers of the job group, or those at given addresses.

    An async context manager, used within one event loop. An episode begins on the server with the fewest episodes of
    this client; a server that does not answer is passed over.
    """

    task = Task.ENVIRONMENT_SERVER

    def __init__(
        self, servers: Sequence[Endpoint] | None = None, token: str | None = None, *, deadline: float = 90.0
    ) -> None:
        """Make a client.

        Args:
            servers: the servers' addresses; None: those of the job group, which are found by their names.
            token: sent as ``Authorization: Bearer``.
            deadline: seconds that one request may take, the time included in which no server answers.
        """
        self._given = None if servers is None else list(servers)
        self._token = token
        self.deadline = deadline
        self._servers: list[EnvironmentServer] = []
        self._active: dict[str, int] = {}
        """Episodes by the server's URL."""
        self._failed: dict[str, float] = {}
        """The time of the last failure by the server's URL, by time.monotonic."""
        self._environment: EnvironmentInfo | None = None
        """The environment of the first episode, which all others must have."""
        self._searched = -SEARCH_SECONDS

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            await server.__aexit__(kind, error, trace)

    async def servers(self) -> list[EnvironmentServer]:
        """Return the known servers, after a search for new ones if the last search was a while ago."""
        if time.monotonic() - self._searched >= SEARCH_SECONDS:
            self._searched = time.monotonic()
            known = {server.url for server in self._servers}
            for address in await find_servers(len(known)) if self._given is None else self._given:
                if address.url not in known:
                    server = EnvironmentServer(address, self._token, deadline=self.deadline)
                    self._servers.append(await server.__aenter__())
        return self._servers

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until one server is healthy.

        Raises:
            DependencyLostError: none was within ``deadline_seconds``.
        """
        end = time.monotonic() + deadline_seconds
        while True:
            servers = await self.servers()
            if any(await asyncio.gather(*(server.is_healthy() for server in servers))):
                return
            if time.monotonic() > end:
                urls = ", ".join(server.url for server in servers)
                reason = f"{urls}; see their logs" if servers else _none_found()
                raise DependencyLostError(f"no environment-server is healthy after {deadline_seconds:g} s: {reason}")
            await asyncio.sleep(PAUSE_SECONDS)

    async def settings(self) -> ComponentRecord:
        """Return the record of settings, commit and packages of one server.

        Raises:
            DependencyLostError: the server did not answer, or there is none.
        """
        servers = await self.servers()
        if not servers:
            raise DependencyLostError(f"no environment-server tells its settings: {_none_found()}")
        return await servers[0].settings()

    async def begin(self, seed: int, split: str | None = None) -> Episode:
        """Begin an episode on any server. The same seed begins the same episode, on every server.

        Raises:
            DependencyLostError: no server began one within the client's deadline.
            RequestRefusedError: the environment has no such split, or cannot begin the episode.
        """
        server, reply = await self.reset(seed, split)
        return Episode(self, server, reply, split)

    async def reset(self, seed: int, split: str | None) -> tuple[EnvironmentServer, ResetReply]:
        """Begin an episode on any server that has the environment of the client's first episode; return both.

        Raises:
            DependencyLostError: no server began one within the client's deadline; the message has both versions of an
                environment that is another one.
            RequestRefusedError: the environment has no such split, or cannot begin the episode.
        """
        request = ResetRequest(seed=seed, split=split, request_id=uuid.uuid4().hex)
        end = time.monotonic() + self.deadline
        while True:
            servers = sorted(await self.servers(), key=self._preference)
            reason = "" if servers else _none_found()
            for server in servers:
                try:
                    reply = await server.reset(request, deadline=min(ANSWER_SECONDS, self.deadline))
                except DependencyLostError as error:
                    reason = str(error)
                else:
                    self._environment = self._environment or reply.environment
                    if reply.environment == self._environment:
                        return server, reply
                    reason = f"{server.url} is refused: {differences(reply.environment, self._environment)}"
                    log.warning("an environment-server is refused", reason=reason)
                self._failed[server.url] = time.monotonic()
            if time.monotonic() > end:
                raise DependencyLostError(f"no environment-server began an episode: {reason}")
            await asyncio.sleep(PAUSE_SECONDS)

    def _preference(self, server: EnvironmentServer) -> tuple[bool, int]:
        """Return a key that orders servers: those that failed a moment ago last, those with few episodes first."""
        failed = self._failed.get(server.url, -FAILED_SECONDS)
        return time.monotonic() - failed < FAILED_SECONDS, self.active_on(server)

    def active_on(self, server: EnvironmentServer) -> int:
        """Return the number of this client's episodes on a server."""
        return self._active.get(server.url, 0)

    def count(self, server: EnvironmentServer, change: int) -> None:
        """Note that an episode has begun (1) or ended (-1) on a server."""
        self._active[server.url] = self.active_on(server) + change

    async def step(self, server: EnvironmentServer, item: StepItem) -> StepResult:
        """Take one action; a server that is well may take as long as the client's deadline.

        Raises:
            DependencyLostError: the server is lost, or too slow.
        """
        end = time.monotonic() + self.deadline
        while True:
            try:
                [result] = await server.step([item], deadline=min(ANSWER_SECONDS, self.deadline))
                return result
            except DependencyLostError:
                if time.monotonic() > end or not await server.is_healthy():
                    self._failed[server.url] = time.monotonic()
                    raise
            await asyncio.sleep(PAUSE_SECONDS)


def differences(found: EnvironmentInfo, expected: EnvironmentInfo) -> str:
    """Return the fields in which an environment differs from the expected one, with both values."""
    values = ((name, getattr(found, name), getattr(expected, name)) for name in EnvironmentInfo.model_fields)
    return ", ".join(f"its environment has {name} {a!r} instead of {b!r}" for name, a, b in values if a != b)


def _none_found() -> str:
    """Return why ``find_servers`` found no server, and what to do.

    Raises:
        ConfigurationError: JOBGROUP_ENDPOINTS has none.
    """
    first = endpoint(Task.ENVIRONMENT_SERVER).host
    return f"no server's name resolves, {first} included; see whether the task {Task.ENVIRONMENT_SERVER.value} runs"


async def find_servers(known: int) -> list[Endpoint]:
    """Return the nodes of the task environment-server, by rank.

    Under SkyPilot those are the ranks whose names resolve, up to the first beyond ``known`` that does not. The local
    runner lists all nodes in JOBGROUP_ENDPOINTS.
    """
    task = Task.ENVIRONMENT_SERVER
    if mapping := mapped_addresses():
        ranks = sum(key.startswith(f"{task.value}-") for key in mapping)
        return [endpoint(task, rank=rank) for rank in range(ranks)]
    if "SKYPILOT_JOBGROUP_NAME" not in os.environ:
        return [endpoint(task)]
    found: list[Endpoint] = []
    for rank in itertools.count():
        address = endpoint(task, rank=rank)
        try:
            await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError:
            if rank >= known:
                return found
        found.append(address)
    raise AssertionError("itertools.count has no end")


class EpisodeLostError(Exception):
    """An episode that cannot go on; the message says why. It has no return, which is not a return of 0."""


class EnvironmentFailedError(EpisodeLostError):
    """An episode whose environment failed by itself, and may do so again."""


class Episode(OngoingEpisode):
    """An episode on a server. ``environment`` is its environment and the form of its states and actions.

    It keeps its seed, its actions, and a digest of every state. If its server is lost, it begins again at any server,
    with the same seed and actions, and goes on if every state is the same. ``end`` must be called when it is over;
    ``async with`` does.
    """

    def __init__(
        self, client: EnvironmentClient, server: EnvironmentServer, reply: ResetReply, split: str | None
    ) -> None:
        [start] = reply.episodes
        super().__init__(start.episode, start.seed, start.state, seat=start.seat or 0)
        self.environment: EnvironmentInfo = reply.environment
        self.status = StepStatus.RUNNING
        self._client = client
        self._server = server
        self._split = split
        self._actions: list[Action] = []
        self._digests = [_digest(start)]
        client.count(server, 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def is_over(self) -> bool:
        """True once the environment has ended the episode."""
        return self.status in (StepStatus.TERMINATED, StepStatus.TRUNCATED)

    async def step(self, action: Action) -> StepResult:
        """Take an action and move on to the state after it. A refused action changes nothing.

        Raises:
            EnvironmentFailedError: the environment failed, and did so again if it is deterministic.
            EpisodeLostError: the server was lost, and the episode cannot go on elsewhere.
            RequestRefusedError: the environment cannot begin the episode again.
        """
        reason, kind = "", EpisodeLostError
        for _ in range(MOST_LOSSES):
            try:
                result = await self._client.step(self._server, self.step_with(action))
            except DependencyLostError as error:
                reason, kind = str(error), EpisodeLostError
            else:
                if result.status is not StepStatus.LOST:
                    self._take(action, result)
                    return result
                reason = f"{self._server.url}: {result.detail}"
                kind = EnvironmentFailedError if result.environment_failed else EpisodeLostError
                if result.environment_failed and not self.environment.deterministic:
                    raise kind(reason)
            await self._begin_again(reason)
        raise kind(f"{reason}; the episode was lost {MOST_LOSSES} times at this action")

    async def end(self) -> None:
        """End the episode on its server, if the environment has not ended it."""
        self._client.count(self._server, -1)
        if not self.is_over:
            try:
                await self._server.end([self.episode], deadline=CLOSE_SECONDS)
            except DependencyLostError:
                return  # The server ends an episode that nobody steps.

    def _take(self, action: Action, result: StepResult) -> None:
        if result.status is StepStatus.REFUSED:
            return
        self.follow(result)
        self.status = result.status
        self._actions.append(action)
        self._digests.append(_digest(result))

    async def _begin_again(self, reason: str) -> None:
        """Begin the episode on any server and take its actions again, until a server has taken them all.

        Raises:
            EpisodeLostError: the environment is not deterministic, or no server has taken all actions in time.
        """
        if not self.environment.deterministic:
            raise EpisodeLostError(f"{reason}; {self.environment.id} does not declare that it is deterministic")
        log.info("episode begins again", seed=self.seed, actions=len(self._actions), reason=reason)
        end = time.monotonic() + self._client.deadline
        while time.monotonic() < end:
            try:
                server, reply = await self._client.reset(self.seed, self._split)
            except DependencyLostError as error:
                raise EpisodeLostError(f"{reason}; then {error}") from error
            self._client.count(self._server, -1)
            self._client.count(server, 1)
            self._server, [start] = server, reply.episodes
            self.episode = start.episode
            self._compare(start, 0)
            if await self._repeat():
                REPLAYED.inc()
                return
        raise EpisodeLostError(f"{reason}; no server took its actions again within {self._client.deadline:g} s")

    async def _repeat(self) -> bool:
        """Take all actions again; return False if the server is lost meanwhile.

        Raises:
            EpisodeLostError: a state is another one than before.
        """
        for step, action in enumerate(self._actions):
            item = StepItem.model_construct(episode=self.episode, step=step, action=action)
            try:
                result = await self._client.step(self._server, item)
            except DependencyLostError:
                return False
            if result.status is StepStatus.LOST:
                return False
            self._compare(result, step + 1)
        return True

    def _compare(self, reached: EpisodeStart | StepResult, actions: int) -> None:
        if _digest(reached) != self._digests[actions]:
            raise EpisodeLostError(
                f"its server was lost, and {self._server.url} reached another state after {actions} actions; is "
                f"{self.environment.id} deterministic, as it declares?"
            )


def _digest(reached: EpisodeStart | StepResult) -> bytes:
    """Return a digest of a state with the reward and the status that came with it."""
    content: list[Any] = [reached.state, reached.seat]
    if isinstance(reached, StepResult):
        content += [reached.status, reached.reward, reached.rewards]
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
