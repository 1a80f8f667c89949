"""A registry of servers and their episodes that counts each episode once, and the dashboard's statistics.

A server is registered under its name, or under the name by which it was discovered. A server with an instance key owns
its name: another server with that name is refused until the owner is silent. An episode belongs to a server; its end
counts once, however often it is reported.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import Counter, Gauge

from services.http.problems import ProblemError
from services.protocol.evaluation import EpisodePosition, EvaluateRequest, FinishedEpisode, ServerMode, ServerState

FINISHED = Counter("head_episodes_finished", "Episodes that came to their end.", ["policy"])
LOST = Counter("head_episodes_lost", "Episodes without news for five minutes, or that broke.")
STATES = Counter("head_states", "States that were answered with actions.", ["policy"])
ACTIVE = Gauge("head_episodes_active", "Episodes under way.")

MAX_SERVERS = 1000
KEPT_ENDED = 10_000
"""Ended episodes of a server that are remembered, so that a repeated report is recognised."""
SILENT_SECONDS = 15.0
"""A pushing server that was not heard for this time is silent, and its name is free for a restarted one."""
IDLE_SECONDS = 300.0
"""An episode without news for this time counts as lost, because its server drops it after the same time."""
WINDOW_SECONDS = 10.0
KEPT_ANSWERS = 2000
"""Answers kept for rates and percentiles. If more come within WINDOW_SECONDS, the window is shorter."""


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count a value (Welford 1962)."""
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)

    def as_dict(self) -> dict[str, float | int | None]:
        """Return count, mean and standard deviation for /stats; None where there are too few values."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None
        return {"count": self.count, "mean": self.mean if self.count else None, "deviation": deviation}


class _Answer(NamedTuple):
    at: float
    states: int
    seconds: float | None


@dataclass
class Server:
    """The record of one server."""

    name: str
    instance_key: str | None = None
    mode: ServerMode = ServerMode.IDLE
    heard: float = field(default_factory=time.monotonic)
    environment: str | None = None
    policy: str | None = None
    requests: int = 0
    states: int = 0
    lost: int = 0
    returns: Moments = field(default_factory=Moments)
    active: dict[str, float] = field(default_factory=dict)
    """The time of the last news of each episode under way."""
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    # Of discovered servers only.
    url: str | None = None
    probed: ServerState | None = None
    """The state that the driver's last probe found."""
    detail: str | None = None

    @property
    def age(self) -> float:
        """Seconds since the server was heard."""
        return time.monotonic() - self.heard

    @property
    def is_heard(self) -> bool:
        """True for a server that pushes and is not silent."""
        return self.mode is ServerMode.PUSHING and self.age <= SILENT_SECONDS

    @property
    def state(self) -> ServerState:
        """The server's state as the dashboard shows it."""
        return ServerState.CONNECTED if self.is_heard else self.probed or ServerState.SILENT

    def row(self) -> dict[str, Any]:
        """Return the server's entry in /stats."""
        plain = ("name", "state", "mode", "url", "environment", "policy", "requests", "states", "lost", "detail")
        return {name: getattr(self, name) for name in plain} | {
            "active": len(self.active),
            "finished": self.returns.count,
            "returns": self.returns.as_dict(),
            "seconds_since_heard": round(self.age, 1),
        }


class Registry:
    """All servers and their episodes."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.requests = 0
        """Requests to /evaluate."""
        self.states = 0
        """States that got actions."""
        self.overloaded = 0
        """Requests that were refused because too many states waited."""
        self._answers: deque[_Answer] = deque(maxlen=KEPT_ANSWERS)
        self.returns = Moments()
        self.newest_returns = Moments()
        """Returns since the dashboard's last point."""
        self.lost = 0
        ACTIVE.set_function(lambda: self.active)

    @property
    def active(self) -> int:
        """Episodes under way."""
        return sum(len(server.active) for server in self.servers.values())

    def stats(self) -> dict[str, Any]:
        """Return counts, the rates a second and latencies of the newest WINDOW_SECONDS, and a row for each server."""
        now = time.monotonic()
        newest = [answer for answer in self._answers if answer.at >= now - WINDOW_SECONDS]
        span = max(1.0, now - newest[0].at) if newest else WINDOW_SECONDS
        latencies = [1000 * answer.seconds for answer in newest if answer.seconds is not None]
        return {
            "requests_per_second": round(len(latencies) / span, 2),
            "states_per_second": round(sum(answer.states for answer in newest) / span, 2),
            "latency_ms": {
                f"p{p}": round(float(np.percentile(latencies, p)), 3) if latencies else None for p in (50, 95, 99)
            },
            "requests": self.requests,
            "states": self.states,
            "overloaded": self.overloaded,
            "episodes": {"active": self.active, "finished": self.returns.count, "lost": self.lost},
            "returns": self.returns.as_dict(),
            "servers": [server.row() for _, server in sorted(self.servers.items())],
        }

    def pushing(self, request: EvaluateRequest) -> Server:
        """Return the record of the server that sent a request.

        Raises:
            ProblemError: another server has that name, or there are too many servers.
        """
        if request.server not in self.servers:
            self._make_room()
        server = self.servers.setdefault(request.server, Server(request.server))
        is_other = server.instance_key != request.instance_key
        if server.mode is ServerMode.DRIVEN or (is_other and server.instance_key is not None and server.is_heard):
            problem = f"another server is called {request.server!r} and was heard {server.age:.0f} s ago"
            raise ProblemError(409, f"{problem}; give another ENVIRONMENT_SERVER_NAME, or wait until it is silent")
        if is_other:
            self.lose(server)
        server.instance_key = request.instance_key
        server.heard = time.monotonic()
        server.mode = ServerMode.PUSHING
        server.environment = request.environment or server.environment
        return server

    def discovered(self, name: str, url: str) -> Server:
        """Return the record of a server that discovery found."""
        server = self.servers.setdefault(name, Server(name))
        server.url = url
        return server

    def vanished(self, name: str) -> None:
        """Record that a discovered server is gone. A server that pushes stays as long as it does."""
        server = self.servers[name]
        server.url = server.probed = server.detail = None
        if server.mode is not ServerMode.PUSHING:
            self._remove(server)

    def played(
        self,
        server: Server,
        policy: str,
        positions: Iterable[EpisodePosition],
        states: int,
        seconds: float | None = None,
    ) -> None:
        """Record that states of a server were answered, at these positions of its episodes.

        ``seconds`` is the latency of the request, if the server sent one.
        """
        server.policy = policy
        server.requests += 1
        server.states += states
        server.heard = time.monotonic()
        self.states += states
        self.requests += seconds is not None
        self._answers.append(_Answer(time.monotonic(), states, seconds))
        STATES.labels(policy).inc(states)
        for position in positions:
            if position.episode not in server.ended:
                server.active[position.episode] = server.heard

    def finish(self, server: Server, report: FinishedEpisode, policy: str) -> None:
        """Count an episode's end, unless it was reported before."""
        if report.episode in server.ended:
            return
        server.ended[report.episode] = None
        if len(server.ended) > KEPT_ENDED:
            server.ended.popitem(last=False)
        server.active.pop(report.episode, None)
        for returns in (server.returns, self.returns, self.newest_returns):
            returns.add(report.episode_return)
        FINISHED.labels(policy).inc()

    def lose(self, server: Server, episodes: Iterable[str] | None = None) -> None:
        """Count episodes as lost, by default all that the server has under way."""
        for episode in list(server.active) if episodes is None else episodes:
            if server.active.pop(episode, None) is not None:
                server.lost += 1
                self.lost += 1
                LOST.inc()

    def drop_idle(self) -> None:
        """Count the episodes without news for IDLE_SECONDS as lost."""
        oldest = time.monotonic() - IDLE_SECONDS
        for server in self.servers.values():
            self.lose(server, [episode for episode, heard in server.active.items() if heard < oldest])

    def _make_room(self) -> None:
        """Drop the longest silent server if there are MAX_SERVERS."""
        if len(self.servers) >= MAX_SERVERS:
            silent = [s for s in self.servers.values() if s.url is None and s.state is ServerState.SILENT]
            if not silent:
                raise ProblemError(429, f"{MAX_SERVERS} servers are connected already", {"Retry-After": "30"})
            self._remove(min(silent, key=lambda s: s.heard))

    def _remove(self, server: Server) -> None:
        self.lose(server)
        del self.servers[server.name]
