"""The client of the job group's environment-servers: episodes, each on one of the servers."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from services.clients.base import ServiceClient
from services.core.endpoints import Endpoint, Task, endpoint, mapped_addresses
from services.core.errors import DependencyLostError
from services.protocol.base import ComponentRecord
from services.protocol.evaluation import (
    Action,
    CloseReply,
    CloseRequest,
    EnvironmentInfo,
    OngoingEpisode,
    ResetReply,
    ResetRequest,
    StepItem,
    StepReply,
    StepRequest,
    StepResult,
    StepStatus,
)

ANSWER_SECONDS = 10.0
"""A server that has not answered a request for so long is asked for its health."""
CLOSE_SECONDS = 5.0
"""Longest wait for the end of an episode, which the server ends by itself when nobody steps it."""
SEARCH_SECONDS = 10.0
"""Time between two searches for servers."""
PAUSE_SECONDS = 0.5
"""Pause before all servers are tried again."""


class EpisodeLostError(Exception):
    """An episode that cannot go on; the message says why. It has no return, which is not a return of 0."""


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
        self._deadline = deadline
        self._servers: list[EnvironmentServer] = []
        self._active: dict[str, int] = {}
        """Episodes by the server's URL."""
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
                    server = EnvironmentServer(address, self._token, deadline=self._deadline)
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
                raise DependencyLostError(
                    f"no environment-server is healthy after {deadline_seconds:g} s: {urls}; see their logs"
                )
            await asyncio.sleep(PAUSE_SECONDS)

    async def settings(self) -> ComponentRecord:
        """Return the record of settings, commit and packages of one server.

        Raises:
            DependencyLostError: the server did not answer.
        """
        return await (await self.servers())[0].settings()

    async def begin(self, seed: int, split: str | None = None) -> Episode:
        """Begin an episode on any server. The same seed begins the same episode, on every server.

        Raises:
            DependencyLostError: no server began one within the client's deadline.
            RequestRefusedError: the environment has no such split.
        """
        request = ResetRequest(seed=seed, split=split, request_id=uuid.uuid4().hex)
        end = time.monotonic() + self._deadline
        while True:
            reason = "there is none"
            for server in sorted(await self.servers(), key=self.active_on):
                try:
                    reply = await server.reset(request, deadline=min(ANSWER_SECONDS, self._deadline))
                except DependencyLostError as error:
                    reason = str(error)
                    continue
                return Episode(self, server, reply)
            if time.monotonic() > end:
                raise DependencyLostError(f"no environment-server began an episode: {reason}")
            await asyncio.sleep(PAUSE_SECONDS)

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
        end = time.monotonic() + self._deadline
        while True:
            try:
                [result] = await server.step([item], deadline=min(ANSWER_SECONDS, self._deadline))
                return result
            except DependencyLostError:
                if time.monotonic() > end or not await server.is_healthy():
                    raise


class Episode(OngoingEpisode):
    """An episode on a server. ``environment`` is its environment and the form of its states and actions.

    ``end`` must be called when it is over; ``async with`` does.
    """

    def __init__(self, client: EnvironmentClient, server: EnvironmentServer, reply: ResetReply) -> None:
        [start] = reply.episodes
        super().__init__(start.episode, start.seed, start.state)
        self.environment: EnvironmentInfo = reply.environment
        self.status = StepStatus.RUNNING
        self._client = client
        self._server = server
        client.count(server, 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def is_over(self) -> bool:
        """Whether the environment has ended the episode."""
        return self.status in (StepStatus.TERMINATED, StepStatus.TRUNCATED)

    async def step(self, action: Action) -> StepResult:
        """Take an action and move on to the state after it. A refused action changes nothing.

        Raises:
            EpisodeLostError: the environment or the server was lost.
        """
        try:
            result = await self._client.step(self._server, self.step_with(action))
        except DependencyLostError as error:
            raise EpisodeLostError(str(error)) from error
        if result.status is StepStatus.LOST:
            raise EpisodeLostError(f"{self._server.url}: {result.detail}")
        if result.status is not StepStatus.REFUSED:
            self.follow(result)
            self.status = result.status
        return result

    async def end(self) -> None:
        """End the episode on its server, if the environment has not ended it."""
        self._client.count(self._server, -1)
        if not self.is_over:
            try:
                await self._server.end([self.episode], deadline=CLOSE_SECONDS)
            except DependencyLostError:
                return  # The server ends an episode that nobody steps.


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
