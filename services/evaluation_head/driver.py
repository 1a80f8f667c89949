"""The driver, which plays on discovered servers: it begins episodes there, asks a policy for actions, and sends them.

Episodes on the replicas of a service begin through the service's load balancer, one a request, because SkyServe's
autoscaler counts these requests. The reply says which replica has the episode, and the actions go there directly.

Servers that push are not driven. The episodes of a server that is lost continue on other servers with the same
environment, if it declares ``deterministic``; otherwise they are lost. A server that cannot be reached, or breaks the
protocol, is tried again; the other servers are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from services.clients.environment import EnvironmentClient, EnvironmentServer, ServedEpisode
from services.clients.play import Decision, Step, play
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.evaluation_head.policy import OverloadedError, Policy
from services.evaluation_head.registry import Registry, Server
from services.evaluation_head.settings import HeadSettings
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import (
    DiscoveredServer,
    EnvironmentInfo,
    EnvironmentServerHealth,
    EpisodePosition,
    ResetReply,
    ResetRequest,
    ServerMode,
    ServerState,
)

log = get_logger(__name__)

PROBE_INTERVAL_SECONDS = 5.0
"""Time between two probes of a server's health while the head does not play on it."""
PROBE_SECONDS = 5.0
"""Limit of the answer to a probe."""
REQUEST_SECONDS = 60.0
"""Limit of one request with its retries, and of the search for a server that takes the episodes of a lost one."""
ENTRANCE_SECONDS = 5.0
"""Limit of one request to a load balancer with its retries."""
ENTRANCE_CLOSED_SECONDS = 30.0
"""After a load balancer did not answer, episodes begin at the replicas directly for this time."""


class Link(EnvironmentClient):
    """The head's connection to one discovered server, and the play of the episodes that begin there.

    If the server is lost, its episodes continue on the servers of other links that have the same environment.
    """

    def __init__(self, server: DiscoveredServer, record: Server, siblings: dict[str, Link], driver: Driver) -> None:
        """Make a link; ``siblings`` has the links to all replicas of the service that are well, by instance."""
        assert server.url is not None
        self._settings = driver.settings
        super().__init__([], self._settings.token, deadline=REQUEST_SECONDS)
        self.url = server.url
        self.record = record
        self._entrance_url = server.entrance
        self._siblings = siblings
        self._driver = driver
        self._registry = driver.registry
        self._entrance_closed_until = 0.0
        self._under_way: list[ServedEpisode] = []
        self._handed_over: list[ServedEpisode] = []
        """Episodes of links that were dropped, which this link continues."""
        self._policy: Policy | None = None
        """The policy that plays; None until one fits."""
        self._begun = 0
        self._given_up = 0
        """Episodes given up since the last step that was taken."""
        self._health_asked = 0.0
        self._is_well = False
        """True from the answer that the server can be played on until the server is lost."""

    async def run(self) -> None:
        """Ask for the server's health, and play while the server is well, until cancelled."""
        async with self:
            self._server = await self.connect(self.url)
            self._entrance = await self.connect(self._entrance_url) if self._entrance_url else None
            try:
                while True:
                    await self._probe()
                    self._given_up = 0
                    await self._take_over()
                    if not self._is_well:
                        self._leave()
                    elif self._room() > 0 or self._under_way:
                        await self._drive()
                    await asyncio.sleep(PROBE_INTERVAL_SECONDS)
            finally:
                self._leave()

    def hand_over(self) -> None:
        """Let the episodes under way continue by the link to another server that has the same environment."""
        other = next((link for link in self._equal_links if link is not self), None)
        if other is None or self.environment is None or not self.environment.deterministic:
            return
        for episode in self._under_way:
            self._registry.move(self._record_of(episode.server), episode.id, other.record, episode.id)
        other._handed_over += self._under_way
        self._under_way.clear()

    async def _take_over(self) -> None:
        """Continue the episodes that other links have handed over."""
        while self._handed_over:
            episode = self._handed_over.pop()
            episode.server = await self.connect(episode.server.url)
            self._under_way.append(episode)

    def _leave(self) -> None:
        """Drop the episodes under way, and take no further ones from other links."""
        self._is_well = False
        for instance in [instance for instance, link in self._siblings.items() if link is self]:
            del self._siblings[instance]
        self._under_way.clear()

    async def _probe(self) -> None:
        """Ask for the server's health; record it and whether the server can be played on."""
        record = self.record
        self._health_asked = time.monotonic()
        self._is_well = False
        try:
            response = await self._server.send_once("GET", "/health", seconds=PROBE_SECONDS)
            health = EnvironmentServerHealth.model_validate_json(response.content)
        except DependencyLostError as error:
            record.probed, record.detail = ServerState.UNREACHABLE, str(error)
            return
        except ValidationError:
            # A server that is starting does not report its environment yet.
            is_starting = response.status_code == 503
            record.probed = ServerState.STARTING if is_starting else ServerState.UNREACHABLE
            record.detail = None if is_starting else f"{self.url} is not an environment server (/health)"
            return
        record.probed = ServerState.CONNECTED if response.status_code == 200 else ServerState.STARTING
        record.environment = health.environment
        record.detail = f"plays by itself, as {health.name}" if health.pushing else None
        record.usage = health.usage
        if record.probed is ServerState.CONNECTED and not health.pushing and not record.is_heard:
            self._siblings[health.instance] = self
            self._is_well = True

    async def _probe_while_playing(self) -> None:
        """Ask for the cores and memory of a server that is played on, and for the health of one that was lost."""
        if not self._is_well:
            await self._probe()
            return
        self._health_asked = time.monotonic()
        with contextlib.suppress(DependencyLostError, ValidationError):
            response = await self._server.send_once("GET", "/health", seconds=PROBE_SECONDS)
            self.record.usage = EnvironmentServerHealth.model_validate_json(response.content).usage

    async def servers(self) -> list[EnvironmentServer]:
        """Return the servers on which episodes can begin again: this link's, and those with the same environment."""
        return [self._server, *[await self.connect(link.url) for link in self._equal_links if link is not self]]

    @property
    def environment(self) -> EnvironmentInfo | None:
        """The server's environment, once an episode has begun."""
        return self.environments.get("")

    @property
    def _equal_links(self) -> list[Link]:
        """The links to servers with this one's environment that can be played on."""
        return [link for link in self._driver.links if link._is_well and link.environment == self.environment]

    def active_on(self, server: EnvironmentServer) -> int:
        """Return the number of the head's episodes on a server."""
        under_way = [episode for link in self._driver.links for episode in link._under_way]
        return sum(episode.server.url == server.url for episode in under_way)

    def note_failure(self, server: EnvironmentServer) -> None:
        """Make a server the last choice for a while, and begin no episode there before it is well again."""
        super().note_failure(server)
        for link in self._driver.links:
            if link.url == server.url:
                link._is_well = False

    def moves(self, episode: ServedEpisode, server: EnvironmentServer, new_id: str) -> None:
        """Let the server that an episode moves to have it in the registry."""
        self._registry.move(self._record_of(episode.server), episode.id, self._record_of(server), new_id)

    def _record_of(self, server: EnvironmentServer) -> Server:
        """Return the record of a server; this link's, if the other one has vanished."""
        return next((link.record for link in self._driver.links if link.url == server.url), self.record)

    def _room(self) -> int:
        """Return how many episodes may be begun now."""
        each, total = self._settings.head_drive_episodes, self._settings.head_drive_total
        # If episodes are given up at their first step, further ones would be, too, until something changes.
        if not self._is_well or self._given_up >= each:
            return 0
        links = set(self._siblings.values())
        # A load balancer may give one replica more episodes than another.
        room = min(each - len(self._under_way), each * len(links) - sum(len(link._under_way) for link in links))
        return room if total is None else min(room, total - self._begun)

    async def _drive(self) -> None:
        """Play until there is nothing left to play, or the server or the policy fails."""
        record = self.record
        record.mode = ServerMode.DRIVEN
        try:
            each = self._settings.head_drive_episodes
            await play(each, self, self._seeds, self._ask, self._note_end, self._note_steps, self._under_way)
        except (DependencyLostError, RequestRefusedError, ProblemError) as error:
            record.detail = error.detail if isinstance(error, ProblemError) else str(error)
            log.warning("playing stopped with an error", server=record.name, error=record.detail)
            with contextlib.suppress(RequestRefusedError):
                await self.end(self._under_way)
        finally:
            record.mode = ServerMode.IDLE
            for episode in self._under_way:
                self._registry.lose(self._record_of(episode.server), [episode.id])
            self._under_way.clear()

    def _seeds(self, _room: int) -> Sequence[int]:
        return [(self._begun + i) % 2**31 for i in range(self._room())]

    async def begin(self, seeds: Sequence[int], split: str | None = None, source: str = "") -> list[ServedEpisode]:
        """Begin episodes at the server; through a load balancer one a request, so that they spread over the replicas.

        Raises:
            DependencyLostError, RequestRefusedError: the server begins none, and no other episode is under way.
        """
        counts = [len(seeds)] if self._entrance is None else [1] * len(seeds)
        begun = await asyncio.gather(*(self._begin(count) for count in counts), return_exceptions=True)
        episodes: list[ServedEpisode] = []
        for result in begun:
            if isinstance(result, list):
                episodes += result
            elif isinstance(result, DependencyLostError) and self._under_way:
                # The episodes under way may continue elsewhere.
                self.note_failure(self._server)
            else:
                raise result
        return episodes

    async def _begin(self, count: int) -> list[ServedEpisode]:
        """Begin episodes, and return those at this link's server; those at another replica join that one's link."""
        request = ResetRequest(episodes=count, seed=self._begun % 2**31, request_id=uuid.uuid4().hex)
        self._begun += count
        try:
            reply = await self._enter(request)
            link = self if reply is None else self._siblings[reply.instance]
            reply = reply or await self._server.reset(request)
        except BaseException:
            self._begun -= count
            raise
        episodes = [ServedEpisode.begun_at(link._server, reply, start, None) for start in reply.episodes]
        policy = link._fitting(reply.environment)
        if policy is None:
            self._begun -= count
            self._given_up = self._settings.head_drive_episodes
            await link.end(episodes)
            return []
        link._policy, link.environments[""] = policy, reply.environment
        if link is self:
            return episodes
        link._under_way += episodes
        return []

    async def _enter(self, request: ResetRequest) -> ResetReply | None:
        """Return the reply of a replica that the load balancer chose; None where the server must be asked directly."""
        if self._entrance is None or time.monotonic() < self._entrance_closed_until:
            return None
        try:
            reply = await self._entrance.reset(request, deadline=ENTRANCE_SECONDS)
        except (DependencyLostError, RequestRefusedError) as error:
            log.warning("the load balancer begins no episode; its replicas are asked", error=str(error))
            self._entrance_closed_until = time.monotonic() + ENTRANCE_CLOSED_SECONDS
            return None
        # A replica that is not connected yet drops the episode when it is not stepped.
        return reply if reply.instance in self._siblings else None

    def _fitting(self, environment: EnvironmentInfo) -> Policy | None:
        """Return the first policy that fits the environment; None if none does, with the reason in the record."""
        if environment.seats > 1:
            self.record.detail = f"{environment.id} has {environment.seats} seats; the head plays environments of one"
            return None
        misfits = []
        for policy in self._driver.policies.values():
            if (misfit := policy.misfit(environment)) is None:
                return policy
            misfits.append(misfit)
        self.record.detail = "; ".join(misfits)
        return None

    async def _ask(self, episodes: Sequence[ServedEpisode]) -> list[Decision]:
        """Return the policy's decisions, and count them for the servers that have the episodes.

        Raises:
            ProblemError: the policy gave no actions.
        """
        if time.monotonic() - self._health_asked > PROBE_INTERVAL_SECONDS:
            await self._probe_while_playing()
        await self._take_over()
        policy = self._policy
        assert policy is not None
        while True:
            try:
                decisions = await policy.act([episode.state for episode in episodes])
                break
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)
        positions: defaultdict[EnvironmentServer, list[EpisodePosition]] = defaultdict(list)
        for episode in episodes:
            positions[episode.server].append(episode.position)
        for server, entries in positions.items():
            self._registry.played(self._record_of(server), policy.name, entries, len(entries))
        return decisions

    def _note_steps(self, _steps: Sequence[Step]) -> None:
        self._given_up = 0

    async def _note_end(self, episode: ServedEpisode) -> None:
        """Count an episode that has ended, or was given up."""
        record = self._record_of(episode.server)
        assert self._policy is not None
        if episode.has_ended:
            self._registry.finish(record, episode.report, self._policy.name)
            return
        self._given_up += 1
        record.detail = f"an episode was given up: {episode.detail}"
        self._registry.lose(record, [episode.id])


class Driver:
    """The links to all discovered servers."""

    def __init__(self, settings: HeadSettings, policies: Mapping[str, Policy], registry: Registry) -> None:
        self.settings = settings
        self.policies = policies
        self.registry = registry
        self._links: dict[str, tuple[DiscoveredServer, Link, asyncio.Task[None]]] = {}
        self._services: defaultdict[str, dict[str, Link]] = defaultdict(dict)
        """The links to the replicas of each service that are well, by instance; by the service's load balancer."""

    @property
    def links(self) -> list[Link]:
        """The links to all servers, in any state."""
        return [link for _, link, _ in self._links.values()]

    def update(self, discovered: list[DiscoveredServer]) -> None:
        """Connect to new servers, and drop the links to servers that vanished or moved."""
        wanted = {server.name: server for server in discovered if server.url is not None}
        for name, (old, link, task) in list(self._links.items()):
            if name not in wanted or (wanted[name].url, wanted[name].entrance) != (old.url, old.entrance):
                link.hand_over()
                task.cancel()
                del self._links[name]
                if name not in wanted:
                    self.registry.vanished(name)
        for name, server in wanted.items():
            if name in self._links or server.url is None:
                continue
            try:
                record = self.registry.discovered(name, server.url)
            except ProblemError as error:
                log.warning("a discovered server is left out", server=name, error=error.detail)
                continue
            siblings = self._services[server.entrance] if server.entrance else {}
            link = Link(server, record, siblings, self)
            task = asyncio.create_task(link.run())
            task.add_done_callback(_log_failure)
            self._links[name] = (server, link, task)

    async def close(self) -> None:
        """Drop all links."""
        tasks = [task for _, _, task in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the link to a server broke", error=repr(error))
