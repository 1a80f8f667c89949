"""The driver, which plays on discovered servers: it begins episodes there, asks a policy for actions, and sends them.

For each episode that begins on a replica of a service, a request goes through the service's load balancer, too, because
SkyServe's autoscaler counts these requests. The episode's own requests go to the replica, which alone has the episode.

Servers that push are not driven. The episodes of a server that is lost are lost. A server that cannot be reached, or
breaks the protocol, is tried again; the other servers are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from pydantic import ValidationError

from services.clients.environment import CLOSE_SECONDS, EnvironmentServer
from services.clients.play import Decision, Episode, Step, play
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.evaluation_head.policies import OverloadedError, Policy
from services.evaluation_head.registry import Registry, Server
from services.evaluation_head.settings import HeadSettings
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError
from services.protocol import evaluation as wire

log = get_logger(__name__)

PROBE_INTERVAL_SECONDS = 5.0
"""Time between two probes of a server's health while the head does not play on it."""
PROBE_SECONDS = 5.0
"""Limit of the answer to a probe."""
REQUEST_SECONDS = 60.0
"""Limit of one request with its retries."""
ENTRANCE_SECONDS = 1.0
"""Limit of one request to a load balancer, whose answer does not matter."""


class Link:
    """The head's connection to one discovered server, and the play of the episodes there; see Arena."""

    def __init__(self, server: wire.DiscoveredServer, record: Server, driver: Driver) -> None:
        assert server.url is not None
        self._settings = driver.settings
        self.discovered = server
        self.record = record
        self.is_dropped = False
        """True once discovery no longer finds the server; the link ends with its episodes."""
        self._policies = driver.policies
        self._registry = driver.registry
        self._server = EnvironmentServer(server.url, self._settings.token, deadline=REQUEST_SECONDS)
        self.under_way: list[Episode] = []
        self._policy: Policy | None = None
        """The policy that plays; None until one fits."""
        self._begun = 0
        self._given_up = 0
        """Episodes given up since the last step that was taken."""
        self._probed = 0.0
        self._is_well = False
        """True from the answer that the server can be played on until the server is lost."""

    async def run(self) -> None:
        """Ask for the server's health, and play while the server is well, until cancelled or dropped."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            entrance = self.discovered.entrance
            self._entrance = None
            if entrance:
                self._entrance = await stack.enter_async_context(EnvironmentServer(entrance, self._settings.token))
            while not self.is_dropped:
                await self._probe()
                self._given_up = 0
                if self._room() > 0:
                    await self._drive()
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)

    async def _probe(self) -> None:
        """Ask for the server's health; record it and whether the server can be played on."""
        record, state, detail, is_well = self.record, wire.ServerState.UNREACHABLE, None, False
        self._probed = time.monotonic()
        try:
            response = await self._server.send_once("GET", "/health", seconds=PROBE_SECONDS)
            if response.status_code == 503:
                state = wire.ServerState.STARTING
            else:
                health = wire.EnvironmentServerHealth.model_validate_json(response.content)
                state, record.environment = wire.ServerState.CONNECTED, health.environment
                detail = f"plays by itself, as {health.name}" if health.pushing else None
                is_well = not health.pushing and not record.is_heard
        except DependencyLostError as error:
            detail = str(error)
        except ValidationError:
            detail = f"{self._server.url} is not an environment server (/health)"
        record.probed, self._is_well = state, is_well
        if detail is not None or not self.under_way:
            record.detail = detail

    def _room(self) -> int:
        """Return how many episodes may be begun now."""
        each, total = self._settings.head_drive_episodes, self._settings.head_drive_total
        # If episodes are given up at their first step, further ones would be, too, until something changes.
        if not self._is_well or self.is_dropped or self._given_up >= each:
            return 0
        room = each - len(self.under_way)
        return room if total is None else min(room, total - self._begun)

    async def _drive(self) -> None:
        """Play until there is nothing left to play, or the server or the policy fails."""
        record = self.record
        record.mode = wire.ServerMode.DRIVEN
        try:
            each = self._settings.head_drive_episodes
            await play(each, self, self._seeds, self._ask, self._note_end, self._note_steps, self.under_way)
        except (DependencyLostError, RequestRefusedError, ProblemError) as error:
            record.detail = error.detail if isinstance(error, ProblemError) else str(error)
            log.warning("playing stopped with an error", server=record.name, error=record.detail)
            await self.end(self.under_way)
        finally:
            record.mode = wire.ServerMode.IDLE
            self._registry.lose(record, [episode.id for episode in self.under_way])
            self.under_way.clear()

    def _seeds(self, _room: int) -> Sequence[int]:
        return [(self._begun + i) % 2**31 for i in range(self._room())]

    async def begin(self, seeds: Sequence[int]) -> list[Episode]:
        """Begin episodes; none if no policy fits them.

        Raises:
            DependencyLostError, RequestRefusedError: the server begins none.
        """
        request = wire.ResetRequest(episodes=len(seeds), seed=seeds[0], request_id=uuid.uuid4().hex)
        reply, _ = await asyncio.gather(self._server.reset(request), self._announce(len(seeds)))
        episodes = [Episode.begun(start, reply.environment) for start in reply.episodes]
        self._policy = self._fitting(reply.environment)
        if self._policy is None:
            self._given_up = self._settings.head_drive_episodes
            await self.end(episodes)
            return []
        self._begun += len(seeds)
        return episodes

    async def step(self, moves: Sequence[tuple[Episode, wire.Action]]) -> list[wire.StepResult]:
        """Take one action in each of some episodes.

        Raises:
            DependencyLostError, RequestRefusedError: the server is lost, or takes none of the actions.
        """
        return await self._server.step([episode.step_with(action) for episode, action in moves])

    async def end(self, episodes: Sequence[Episode]) -> None:
        """End episodes early; a server that is lost has none."""
        over = [episode.id for episode in episodes if not episode.has_ended]
        with contextlib.suppress(DependencyLostError, RequestRefusedError):
            if over:
                await self._server.end(over, deadline=CLOSE_SECONDS)

    async def _announce(self, episodes: int) -> None:
        """Send a request an episode through the load balancer of the server's service, if it has one."""
        if self._entrance is not None:
            requests = [self._entrance.send_once("GET", "/health", seconds=ENTRANCE_SECONDS) for _ in range(episodes)]
            await asyncio.gather(*requests, return_exceptions=True)

    def _fitting(self, environment: wire.EnvironmentInfo) -> Policy | None:
        """Return the first policy that fits the environment; None if none does, with the reason in the record."""
        if environment.seats > 1:
            self.record.detail = f"{environment.id} has {environment.seats} seats; the head plays environments of one"
            return None
        misfits = []
        for policy in self._policies.values():
            if (misfit := policy.misfit(environment)) is None:
                return policy
            misfits.append(misfit)
        self.record.detail = "; ".join(misfits)
        return None

    async def _ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Return the policy's decisions, and count them.

        Raises:
            ProblemError: the policy gave no actions.
        """
        if time.monotonic() - self._probed > PROBE_INTERVAL_SECONDS:
            await self._probe()
        policy = self._policy
        assert policy is not None
        while True:
            try:
                decisions = await policy.act([episode.state for episode in episodes])
                break
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)
        positions = [episode.position for episode in episodes]
        self._registry.played(self.record, policy.name, positions, len(positions))
        return decisions

    def _note_steps(self, _steps: Sequence[Step]) -> None:
        self._given_up = 0

    async def _note_end(self, episode: Episode) -> None:
        """Count an episode that has ended, or was given up."""
        assert self._policy is not None
        if episode.has_ended:
            self._registry.finish(self.record, episode.report, self._policy.name)
            return
        self._given_up += 1
        self.record.detail = f"an episode was given up: {episode.detail}"
        self._registry.lose(self.record, [episode.id])


class Driver:
    """The links to all discovered servers."""

    def __init__(self, settings: HeadSettings, policies: Mapping[str, Policy], registry: Registry) -> None:
        self.settings = settings
        self.policies = policies
        self.registry = registry
        self._tasks: dict[Link, asyncio.Task[None]] = {}

    @property
    def links(self) -> list[Link]:
        """The links to all servers, in any state, and to former ones while they have episodes."""
        return list(self._tasks)

    def update(self, discovered: list[wire.DiscoveredServer]) -> None:
        """Connect to new servers, and drop the links to servers that vanished or moved."""
        wanted = {server.name: server for server in discovered if server.url is not None}
        for link in self.links:
            now, old = wanted.get(link.record.name), link.discovered
            if now and not link.is_dropped and (now.url, now.entrance) == (old.url, old.entrance):
                del wanted[now.name]
                continue
            link.is_dropped = True
            if not link.under_way:
                self._tasks[link].cancel()
        for name, server in wanted.items():
            link = Link(server, self.registry.discovered(name, str(server.url)), self)
            self._tasks[link] = asyncio.create_task(link.run())
            self._tasks[link].add_done_callback(partial(self._end, link))

    def _end(self, link: Link, task: asyncio.Task[None]) -> None:
        """Forget a link that has ended, and its server unless another link has the same name."""
        del self._tasks[link]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the link to a server broke", error=repr(error))
        if link.is_dropped and all(other.record is not link.record for other in self.links):
            self.registry.vanished(link.record.name)

    async def close(self) -> None:
        """Drop all links."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
