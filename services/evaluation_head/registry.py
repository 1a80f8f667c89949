"""What the head knows of each server and of each episode, and that nothing is counted twice.

A server is accounted for under its name. One that has an instance key (or is discovered, and shows the key's
fingerprint at /health) holds its name: another that comes with the same name is refused until the holder is silent.
An episode belongs to a server; its end is counted once, however often and by whichever way it is reported.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge

from services.protocol.evaluation import EpisodePosition, EvaluateRequest, FinishedEpisode, ServerMode, ServerState

FINISHED = Counter("head_episodes_finished", "Episodes that came to their end.", ["policy"])
LOST = Counter("head_episodes_lost", "Episodes that nothing is heard of any more, or that broke.")
STATES = Counter("head_states", "States that were answered with actions.", ["policy"])
ACTIVE = Gauge("head_episodes_active", "Episodes under way.")

MAX_SERVERS = 1000
MAX_ACTIVE = 100_000
KEPT_FINISHED = 200_000
KEPT_RETURNS = 2000


class NameTakenError(Exception):
    """Another server has that name."""


class TooManyServersError(Exception):
    """There are as many names as the head keeps accounts for."""


@dataclass
class Mean:
    """Mean and standard deviation of what is added, by Welford's method."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Takes one more value."""
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)

    def as_dict(self) -> dict[str, float | int | None]:
        """For /stats; None where there are too few values."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None
        return {"count": self.count, "mean": self.mean if self.count else None, "deviation": deviation}


@dataclass
class Episode:
    """An episode under way."""

    server: str
    environment: str | None
    step: int
    episode_return: float
    heard: float


@dataclass
class Server:
    """One server's account."""

    name: str
    instance: str | None = None
    mode: ServerMode = ServerMode.IDLE
    heard: float = field(default_factory=time.monotonic)
    environment: str | None = None
    policy: str | None = None
    requests: int = 0
    states: int = 0
    refused: int = 0
    active: int = 0
    lost: int = 0
    steps: int = 0
    returns: Mean = field(default_factory=Mean)
    merged_into: Server | None = None
    # Of discovered servers only.
    url: str | None = None
    source: str | None = None
    found: ServerState | None = None
    detail: str | None = None
    milliseconds: float | None = None


def fingerprint(instance_key: str) -> str:
    """What of an instance key may be shown; the environment server makes it in the same way."""
    return hashlib.sha256(instance_key.encode()).hexdigest()[:16]


class Accounts:
    """All servers and episodes."""

    def __init__(self, *, silent_seconds: float, idle_seconds: float) -> None:
        self._silent = silent_seconds
        self._idle = idle_seconds
        self.servers: dict[str, Server] = {}
        self._episodes: OrderedDict[tuple[str, str], Episode] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.recent: deque[tuple[float, float]] = deque(maxlen=KEPT_RETURNS)
        """When the newest episodes ended, and with what return."""
        self.returns = Mean()
        self.finished = 0
        self.lost = 0
        self.repeated = 0
        self.states = 0

    @property
    def active(self) -> int:
        """Episodes under way."""
        return len(self._episodes)

    # --- servers ---------------------------------------------------------------------------------------------------

    def pushing(self, request: EvaluateRequest) -> Server:
        """The account of who sent a request.

        Raises:
            NameTakenError: it comes under another's name.
            TooManyServersError: there is no room for one more.
        """
        instance = fingerprint(request.instance_key) if request.instance_key else None
        # One that was discovered too goes on under the name it was discovered by.
        known = next((s for s in self.servers.values() if instance is not None and s.instance == instance), None)
        server = known or self.servers.get(request.server)
        if server is None:
            server = self._open(request.server)
        elif server.instance != instance:
            if server.instance is not None and self.state_of(server) is not ServerState.SILENT:
                raise NameTakenError(
                    f"another server is called {request.server!r} and was heard {self._age(server):.0f} s ago; give "
                    "ENVIRONMENT_SERVER_NAME another name, or wait until that one is silent"
                )
            self._lose_episodes(server)
        server.instance = instance
        server.heard = time.monotonic()
        server.mode = ServerMode.PUSHING
        server.environment = request.environment or server.environment
        return server

    def discovered(self, name: str, url: str, source: str) -> Server:
        """The account of a server that discovery found."""
        server = self.servers.get(name) or self._open(name)
        server.url, server.source = url, source
        return server

    def identify(self, server: Server, instance: str) -> Server:
        """Says which instance answers at a discovered server's address, and returns its account.

        Where that instance pushes under another name, the two accounts become one, under the discovered name.
        """
        other = next((s for s in self.servers.values() if s is not server and s.instance == instance), None)
        if server.instance not in (None, instance) and server.mode is not ServerMode.PUSHING:
            self._lose_episodes(server)
        if other is not None and other.url is None:
            self._merge(other, server)
        server.instance = instance
        return server

    def twin(self, server: Server, instance: str) -> Server | None:
        """Another discovered server which is the same instance at another address."""
        same = (s for s in self.servers.values() if s.instance == instance and s.url is not None)
        return next((s for s in same if s is not server), None)

    def vanished(self, name: str) -> None:
        """A discovered server is no longer there. One that pushes keeps its account as long as it does."""
        server = self.servers.get(name)
        if server is None:
            return
        server.url = server.source = server.found = server.detail = None
        if server.mode is not ServerMode.PUSHING:
            self._lose_episodes(server)
            del self.servers[name]

    def state_of(self, server: Server) -> ServerState:
        """How a server does."""
        if server.mode is ServerMode.PUSHING and self._age(server) <= self._silent:
            return ServerState.CONNECTED
        return server.found or ServerState.SILENT

    def _age(self, server: Server) -> float:
        return time.monotonic() - server.heard

    def _open(self, name: str) -> Server:
        if len(self.servers) >= MAX_SERVERS:
            silent = [s for s in self.servers.values() if s.url is None and self.state_of(s) is ServerState.SILENT]
            if not silent:
                raise TooManyServersError(f"{MAX_SERVERS} servers are connected already")
            oldest = min(silent, key=lambda s: s.heard)
            self._lose_episodes(oldest)
            del self.servers[oldest.name]
        server = self.servers[name] = Server(name)
        return server

    def _merge(self, old: Server, new: Server) -> None:
        for key in [key for key, episode in self._episodes.items() if episode.server == old.name]:
            episode = self._episodes.pop(key)
            episode.server = new.name
            self._episodes[new.name, key[1]] = episode
        for key in [key for key in self._ended if key[0] == old.name]:
            self._ended[new.name, key[1]] = self._ended.pop(key)
        for count in ("requests", "states", "refused", "active", "lost", "steps"):
            setattr(new, count, getattr(new, count) + getattr(old, count))
        new.returns = _together(new.returns, old.returns)
        new.mode, new.heard, new.policy = old.mode, old.heard, old.policy
        new.environment = old.environment or new.environment
        # Requests of the old one that wait for their actions are accounted for when they have them.
        old.merged_into = new
        del self.servers[old.name]

    # --- episodes --------------------------------------------------------------------------------------------------

    def played(self, server: Server, policy: str, states: int, positions: Iterable[EpisodePosition] = ()) -> None:
        """Some of a server's states were answered."""
        server = server.merged_into or server
        server.policy = policy
        server.requests += 1
        server.states += states
        server.heard = time.monotonic()
        self.states += states
        STATES.labels(policy).inc(states)
        # Its account may have been dropped while it waited for the actions.
        if self.servers.get(server.name) is server:
            for position in positions:
                self._note(server, position)
        ACTIVE.set(len(self._episodes))

    def _note(self, server: Server, position: EpisodePosition) -> None:
        key = (server.name, position.episode)
        if key in self._ended:
            return
        episode = self._episodes.get(key)
        if episode is None:
            server.active += 1
            episode = self._episodes[key] = Episode(server.name, server.environment, 0, 0.0, 0.0)
            if len(self._episodes) > MAX_ACTIVE:
                self._lose(next(iter(self._episodes)))
        if position.step >= episode.step:
            episode.step, episode.episode_return = position.step, position.episode_return
        episode.heard = time.monotonic()
        self._episodes.move_to_end(key)

    def finish(self, server: Server, report: FinishedEpisode, policy: str) -> bool:
        """An episode has ended; returns whether that is news."""
        key = (server.name, report.episode)
        if key in self._ended:
            self.repeated += 1
            return False
        self._ended[key] = None
        if len(self._ended) > KEPT_FINISHED:
            self._ended.popitem(last=False)
        if self._episodes.pop(key, None) is not None:
            server.active -= 1
        server.returns.add(report.episode_return)
        server.steps += report.steps
        self.returns.add(report.episode_return)
        self.recent.append((time.time(), report.episode_return))
        self.finished += 1
        FINISHED.labels(policy).inc()
        ACTIVE.set(len(self._episodes))
        return True

    def lose(self, server: Server, episodes: Iterable[str]) -> None:
        """Episodes broke, or nobody will hear of them again."""
        for episode in episodes:
            if (server.name, episode) in self._episodes:
                self._lose((server.name, episode))

    def drop_idle(self) -> None:
        """Gives up the episodes that nothing was heard of for too long."""
        oldest = time.monotonic() - self._idle
        while self._episodes:
            key, episode = next(iter(self._episodes.items()))
            if episode.heard >= oldest:
                return
            self._lose(key)

    def _lose(self, key: tuple[str, str]) -> None:
        server = self.servers[self._episodes.pop(key).server]
        server.active -= 1
        server.lost += 1
        self.lost += 1
        LOST.inc()
        ACTIVE.set(len(self._episodes))

    def _lose_episodes(self, server: Server) -> None:
        self.lose(server, [episode for name, episode in self._episodes if name == server.name])

    # --- what is shown ---------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """The servers, for /stats."""
        return [
            {
                "name": server.name,
                "state": self.state_of(server),
                "mode": server.mode,
                "source": server.source,
                "url": server.url,
                "instance": server.instance,
                "environment": server.environment,
                "policy": server.policy,
                "requests": server.requests,
                "states": server.states,
                "refused": server.refused,
                "active": server.active,
                "finished": server.returns.count,
                "lost": server.lost,
                "mean_steps": server.steps / server.returns.count if server.returns.count else None,
                "returns": server.returns.as_dict(),
                "seconds_since_heard": round(self._age(server), 1),
                "milliseconds": server.milliseconds,
                "detail": server.detail,
            }
            for server in sorted(self.servers.values(), key=lambda s: s.name)
        ]


def _together(a: Mean, b: Mean) -> Mean:
    count = a.count + b.count
    if not count:
        return Mean()
    change = b.mean - a.mean
    squares = a.squares + b.squares + change**2 * a.count * b.count / count
    return Mean(count, a.mean + change * b.count / count, squares)
