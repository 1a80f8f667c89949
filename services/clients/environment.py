"""The client of the job group's environment-servers: episodes, each on one of the servers.

An episode whose server is lost continues on another server, or on the restarted one, if its environment declares that
it is deterministic: it begins again with the same seed and takes the same actions. Any other episode can only wait for
its server, which it does for WAIT_SECONDS; then it is lost. A healthy server may take until the client's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
import prometheus_client

from services.clients.play import Episode
from services.core.endpoints import PORTS, Endpoint, Task, endpoint, mapped_addresses, task_names
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import RequestRefusedError, ServiceClient
from services.protocol import evaluation as wire
from services.protocol.base import ComponentRecord

log = get_logger(__name__)

REPLAYED = prometheus_client.Counter(
    "client_episodes_replayed", "Episodes whose server was lost and whose actions were taken again."
)


CLOSE_SECONDS = 5.0
"""Longest wait for the end of an episode. A server also ends by itself an episode that is not stepped for a while."""
MOST_LOSSES = 3
"""An action at which an episode was lost this often in a row is the cause."""
ANSWER_SECONDS = 10.0
"""A server that has not answered a request after this time is asked for its health."""
WAIT_SECONDS = 60.0
"""The time that an episode which can continue on no other server waits for its own to be healthy again."""
FAILED_SECONDS = 10.0
"""A server that has failed is the last choice for this time."""
SEARCH_SECONDS = 10.0
"""Time between two searches for servers."""
MISDIRECTED = 421
"""The status with which a server refuses a task of another server's image (RFC 9110, 15.5.20)."""
PAUSE_SECONDS = 0.5
"""Pause before all servers, or a step at the same server, are tried again."""


class EnvironmentServer(ServiceClient):
    """One environment-server. Repeating any of these requests does no harm."""

    task = Task.ENVIRONMENT_SERVER

    async def reset(self, request: wire.ResetRequest, *, deadline: float | None = None) -> wire.ResetReply:
        """Begin episodes; the reply has one for each that was asked for."""
        reply = await self.call("POST", "/reset", wire.ResetReply, request, deadline=deadline)
        if len({start.episode for start in reply.episodes}) != request.episodes:
            raise DependencyLostError(f"{self.url}/reset began other episodes than the {request.episodes} asked for")
        return reply

    async def step(self, items: Sequence[wire.StepItem], *, deadline: float | None = None) -> list[wire.StepResult]:
        """Take one action in each of some episodes; return one result an item, in order."""
        request = wire.StepRequest.model_construct(steps=list(items))
        reply = await self.call("POST", "/step", wire.StepReply, request, deadline=deadline)
        if [result.episode for result in reply.results] != [item.episode for item in items]:
            raise DependencyLostError(f"{self.url}/step answered for other episodes than it was asked for")
        for item, result in zip(items, reply.results, strict=True):
            if result.is_taken and (
                result.steps != item.step + 1 or result.state is None or not math.isfinite(result.reward)
            ):
                raise DependencyLostError(
                    f"{self.url}/step counts {result.steps} steps after {item.step}, or gives no state or no reward"
                )
        return reply.results

    async def end(self, episodes: Sequence[str], *, deadline: float | None = None) -> wire.CloseReply:
        """End episodes early."""
        request = wire.CloseRequest(episodes=list(episodes))
        return await self.call("POST", "/close", wire.CloseReply, request, deadline=deadline)


class EpisodeLostError(Exception):
    """An episode that cannot continue; the message says why."""


@dataclass(eq=False, kw_only=True)
class ServedEpisode(Episode):
    """An episode on a server, with what it needs to begin again on another one: actions, and a digest of each state."""

    environment: wire.EnvironmentInfo
    server: EnvironmentServer
    split: str | None
    source: str = ""
    actions: list[wire.Action] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def remember(self, action: wire.Action, result: wire.StepResult) -> None:
        """Keep an action and the digest of its result, if the environment could repeat both elsewhere."""
        if self.environment.deterministic:
            self.actions.append(action)
            self.digests.append(_digest(result))

    def compare(self, reached: wire.EpisodeStart | wire.StepResult, actions: int, url: str) -> None:
        """Check that the server at ``url`` reached the same state as before after a number of actions.

        Raises:
            EpisodeLostError: it did not.
        """
        if _digest(reached) != self.digests[actions]:
            raise EpisodeLostError(
                f"its server was lost, and {url} reached another state after {actions} actions; is "
                f"{self.environment.id} deterministic, as it declares?"
            )


def _lost(episode_id: str, why: str) -> wire.StepResult:
    return wire.StepResult(episode=episode_id, status=wire.StepStatus.LOST, detail=why)


def _digest(reached: wire.EpisodeStart | wire.StepResult) -> bytes:
    """Return a digest of a state with the reward and the status that came with it."""
    content: list[Any] = [reached.state, reached.seat]
    if isinstance(reached, wire.StepResult):
        content += [reached.status, reached.reward, reached.rewards]
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


class EnvironmentClient:
    """All environment-servers of the job group, or those at given addresses.

    An async context manager, used within one event loop. An episode begins on the server with the fewest episodes of
    this client, among those that have the image of its task; a server that does not answer is passed over.
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
        self._searches = servers is None
        self._nodes = {server.url: server for server in servers or ()}
        """The servers' addresses, by the names of their nodes where these are searched for, else by URL."""
        self._token = token
        self.deadline = deadline
        self._servers: dict[str, EnvironmentServer] = {}
        self._active: Counter[str] = Counter()
        """Episodes by the server's URL."""
        self._failed: dict[str, float] = {}
        """The time of the last failure by the server's URL, by time.monotonic."""
        self.environments: dict[str, wire.EnvironmentInfo] = {}
        """The environment of the first episode by its source, which all others of the source must have."""
        self._misdirected: dict[tuple[str, int], str] = {}
        """Why a server does not play a seed, and another one does, by the server's URL and the seed."""
        self._searched = -SEARCH_SECONDS

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            await server.__aexit__()

    async def servers(self) -> list[EnvironmentServer]:
        """Return the known servers, after a search for new ones if the last search was a while ago."""
        if time.monotonic() - self._searched >= SEARCH_SECONDS:
            self._searched = time.monotonic()
            if self._searches:
                self._nodes = await find_servers(self._nodes)
            for address in self._nodes.values():
                await self.connect(address.url)
        return list(self._servers.values())

    async def connect(self, url: str) -> EnvironmentServer:
        """Return the connection to the server at ``url``; the client closes it."""
        if url not in self._servers:
            server = EnvironmentServer(url, self._token, deadline=self.deadline)
            self._servers[url] = await server.__aenter__()
        return self._servers[url]

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until one server is healthy, of each image where images have servers of their own.

        Raises:
            DependencyLostError: none was within ``deadline_seconds``.
        """
        end = time.monotonic() + deadline_seconds
        while True:
            servers = await self.servers()
            are_healthy = await asyncio.gather(*(server.is_healthy() for server in servers))
            healthy = {server.url for server, is_healthy in zip(servers, are_healthy, strict=True) if is_healthy}
            up = {node.rpartition("-")[0] for node, address in self._nodes.items() if address.url in healthy}
            silent = [name for name in task_names(self.task) if name not in up] if self._searches or not up else []
            if not silent:
                return
            if time.monotonic() > end:
                urls = ", ".join(server.url for server in servers if server.url not in healthy)
                reason = f"{urls}; see their logs" if urls else _none_found(silent[0])
                raise DependencyLostError(f"no {', '.join(silent)} is healthy after {deadline_seconds:g} s: {reason}")
            await asyncio.sleep(PAUSE_SECONDS)

    async def settings(self) -> ComponentRecord:
        """Return the record of settings, commit and packages of one server.

        Raises:
            DependencyLostError: the server did not answer, or none was found.
        """
        servers = await self.servers()
        if not servers:
            raise DependencyLostError(f"no environment-server has sent its settings: {_none_found()}")
        return await servers[0].settings()

    async def begin(self, seed: int, split: str | None = None, source: str = "") -> ServedEpisode:
        """Begin an episode of a source's environment. A seed begins the same episode on every server.

        Raises:
            DependencyLostError: no server began one within the client's deadline.
            RequestRefusedError: the environment has no such split, or cannot begin the episode.
        """
        server, reply = await self._reset(seed, split, source)
        self._active[server.url] += 1
        info, start = reply.environment, reply.episodes[0]
        episode = ServedEpisode.begun(start, info, environment=info, server=server, split=split, source=source)
        if info.deterministic:
            episode.digests.append(_digest(start))
        return episode

    async def step(self, episode: ServedEpisode, action: wire.Action) -> wire.StepResult:
        """Take an action in an episode, which continues on another server if its own one is lost.

        Raises:
            RequestRefusedError: the environment cannot begin the episode again.
        """
        result = await self._step_on(episode.server, episode, episode.step_with(action))
        if result.status is wire.StepStatus.LOST:
            result = await self._recover(episode, action, result)
        if result.is_taken:
            episode.remember(action, result)
        return result

    async def end(self, episode: ServedEpisode) -> None:
        """End an episode on its server, if the environment has not ended it."""
        self._active[episode.server.url] -= 1
        if not episode.has_ended:
            # A server that is away ends the episode later, when it has not been stepped for a while.
            with contextlib.suppress(DependencyLostError):
                await episode.server.end([episode.id], deadline=CLOSE_SECONDS)

    async def _reset(self, seed: int, split: str | None, source: str) -> tuple[EnvironmentServer, wire.ResetReply]:
        """Begin an episode on any server that has the environment of the source's first episode; return both.

        Raises:
            DependencyLostError: no server began one within the client's deadline; the message has both versions of an
                environment that is another one.
            RequestRefusedError: the environment has no such split, or cannot begin the episode.
        """
        request = wire.ResetRequest(seed=seed, split=split, source=source, request_id=uuid.uuid4().hex)
        end = time.monotonic() + self.deadline
        while True:
            servers = sorted(await self.servers(), key=self._preference)
            reason = "" if servers else _none_found()
            for server in servers:
                if (server.url, seed) in self._misdirected:
                    reason = reason or self._misdirected[server.url, seed]
                    continue
                try:
                    reply = await server.reset(request, deadline=min(ANSWER_SECONDS, self.deadline))
                except RequestRefusedError as error:
                    if error.status != MISDIRECTED:
                        raise
                    reason = self._misdirected[server.url, seed] = error.detail
                    continue
                except DependencyLostError as error:
                    reason = str(error)
                else:
                    expected = self.environments.setdefault(source, reply.environment)
                    if reply.environment == expected:
                        return server, reply
                    reason = f"{server.url} is refused: {differences(reply.environment, expected)}"
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
        return self._active[server.url]

    async def _step_on(self, server: EnvironmentServer, episode: ServedEpisode, item: wire.StepItem) -> wire.StepResult:
        """Take an action of an episode on a server, with the patience that the module's text describes."""
        began = time.monotonic()
        patience = 0.0 if episode.environment.deterministic else WAIT_SECONDS
        while True:
            try:
                [result] = await server.step([item], deadline=min(ANSWER_SECONDS, self.deadline))
                return result
            except DependencyLostError as error:
                waited = time.monotonic() - began
                if waited > self.deadline or (waited > patience and not await server.is_healthy()):
                    self._failed[server.url] = time.monotonic()
                    return _lost(item.episode, str(error))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _recover(self, episode: ServedEpisode, action: wire.Action, lost: wire.StepResult) -> wire.StepResult:
        """Return the result of an action at which an episode was lost, after further attempts elsewhere."""
        for _ in range(MOST_LOSSES - 1):
            if lost.environment_failed and not episode.environment.deterministic:
                return lost
            try:
                await self._begin_again(episode, str(lost.detail))
            except EpisodeLostError as error:
                return _lost(episode.id, str(error))
            result = await self._step_on(episode.server, episode, episode.step_with(action))
            if result.status is not wire.StepStatus.LOST:
                return result
            lost = result
        detail = f"{lost.detail}; the episode was lost {MOST_LOSSES} times at this action"
        return lost.model_copy(update={"detail": detail})

    async def _begin_again(self, episode: ServedEpisode, reason: str) -> None:
        """Begin an episode on any server and take its actions again, until a server has taken them all.

        Raises:
            EpisodeLostError: the environment is not deterministic, or no server has taken all actions in time.
        """
        if not episode.environment.deterministic:
            raise EpisodeLostError(f"{reason}; {episode.environment.id} does not declare that it is deterministic")
        log.info("episode begins again", seed=episode.seed, actions=len(episode.actions), reason=reason)
        end = time.monotonic() + self.deadline
        while time.monotonic() < end:
            try:
                server, reply = await self._reset(episode.seed, episode.split, episode.source)
            except DependencyLostError as error:
                raise EpisodeLostError(f"{reason}; then {error}") from error
            [start] = reply.episodes
            if await self._repeat(episode, server, start):
                # Only now, so that a cancelled recovery leaves the episode as it was.
                self._active[episode.server.url] -= 1
                self._active[server.url] += 1
                episode.server, episode.id = server, start.episode
                REPLAYED.inc()
                return
        raise EpisodeLostError(f"{reason}; no server took its actions again within {self.deadline:g} s")

    async def _repeat(self, episode: ServedEpisode, server: EnvironmentServer, start: wire.EpisodeStart) -> bool:
        """Take all actions again in an episode that has begun; return False if its server is lost meanwhile.

        Raises:
            EpisodeLostError: a state is another one than before.
        """
        episode.compare(start, 0, server.url)
        for step, action in enumerate(episode.actions):
            item = wire.StepItem.model_construct(episode=start.episode, step=step, action=action)
            result = await self._step_on(server, episode, item)
            if result.status is wire.StepStatus.LOST:
                return False
            episode.compare(result, step + 1, server.url)
        return True


def differences(actual: wire.EnvironmentInfo, expected: wire.EnvironmentInfo) -> str:
    """Return the fields in which an environment differs from the expected one, with both values."""
    values = ((name, getattr(actual, name), getattr(expected, name)) for name in wire.EnvironmentInfo.model_fields)
    return ", ".join(f"its environment has {name} {a!r} instead of {b!r}" for name, a, b in values if a != b)


def _none_found(task: str = Task.ENVIRONMENT_SERVER.value) -> str:
    """Return why ``find_servers`` found no server of a task, and what to do.

    Raises:
        ConfigurationError: JOBGROUP_ENDPOINTS has none.
    """
    first = endpoint(Task.ENVIRONMENT_SERVER, name=task).host
    return f"no server's name resolves, {first} included; see whether the task {task} runs"


async def find_servers(known: Collection[str] = (), task: Task = Task.ENVIRONMENT_SERVER) -> dict[str, Endpoint]:
    """Return the nodes of a component by name, such as ``gateway-0``.

    Under SkyPilot those are the ranks of each of its tasks whose names resolve or are ``known``, up to the first
    that is neither. The local runner lists all nodes in JOBGROUP_ENDPOINTS.
    """
    mapping = mapped_addresses()
    is_alone = not mapping and "SKYPILOT_JOBGROUP_NAME" not in os.environ
    nodes: dict[str, Endpoint] = {}
    for name in task_names(task):
        for rank in range(1) if is_alone else itertools.count():
            node = f"{name}-{rank}"
            if mapping and f"{node}:{PORTS[task][0]}" not in mapping:
                break
            address = endpoint(task, rank=rank, name=name)
            if not (mapping or is_alone or node in known or await _resolves(address)):
                break
            nodes[node] = address
    return nodes


async def _resolves(address: Endpoint) -> bool:
    try:
        await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return True
