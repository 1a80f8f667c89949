"""A registry of servers and their episodes that counts each episode once.

A server is registered under its name. A server with an instance key, or one that is discovered and shows the key's
fingerprint at /health, owns its name: another server with that name is refused until the owner is silent. An episode
belongs to a server; its end counts once, however often and by whichever way it is reported.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge

from services.evaluation_head.statistics import Meter, Moments
from services.http.problems import ProblemError
from services.protocol.evaluation import (
    EpisodePosition,
    EvaluateRequest,
    FinishedEpisode,
    ServerMode,
    ServerState,
    fingerprint,
)

FINISHED = Counter("head_episodes_finished", "Episodes that came to their end.", ["policy"])
LOST = Counter("head_episodes_lost", "Episodes that nothing is heard of any more, or that broke.")
STATES = Counter("head_states", "States that were answered with actions.", ["policy"])
ACTIVE = Gauge("head_episodes_active", "Episodes under way.")

MAX_SERVERS = 1000
MAX_ACTIVE = 10_000
"""Episodes of a server under way; beyond it the oldest counts as lost. It bounds the memory a client can take."""
KEPT_ENDED = 10_000
"""Ended episodes of a server that are remembered, so that a repeated report is recognised."""
SILENT_SECONDS = 15.0
"""A pushing server that was not heard for so long is silent, and its name is free for a restarted one."""
IDLE_SECONDS = 300.0
"""An episode that was not heard of for so long counts as lost, as its server drops it after the same time."""

_SHOWN = (
    *("name", "state", "mode", "source", "url", "instance", "environment", "policy"),
    *("requests", "states", "refused", "lost", "milliseconds", "detail"),
)


@dataclass
class Server:
    """The record of one server."""

    name: str
    instance: str | None = None
    mode: ServerMode = ServerMode.IDLE
    heard: float = field(default_factory=time.monotonic)
    environment: str | None = None
    policy: str | None = None
    requests: int = 0
    states: int = 0
    refused: int = 0
    lost: int = 0
    steps: int = 0
    returns: Moments = field(default_factory=Moments)
    active: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """When the episodes under way were heard of, the oldest first."""
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    # Of discovered servers only.
    url: str | None = None
    source: str | None = None
    found: ServerState | None = None
    detail: str | None = None
    milliseconds: float | None = None

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
        return ServerState.CONNECTED if self.is_heard else self.found or ServerState.SILENT

    def row(self) -> dict[str, Any]:
        """Return the server's entry in /stats."""
        finished = self.returns.count
        return {name: getattr(self, name) for name in _SHOWN} | {
            "active": len(self.active),
            "finished": finished,
            "mean_steps": self.steps / finished if finished else None,
            "returns": self.returns.as_dict(),
            "seconds_since_heard": round(self.age, 1),
        }


class Registry:
    """All servers and their episodes."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.servers: dict[str, Server] = {}
        self.returns = Moments()
        self.newest_returns = Moments()
        """Returns since the dashboard's last point."""
        self.lost = 0
        self.repeated = 0
        ACTIVE.set_function(lambda: self.active)

    @property
    def active(self) -> int:
        """Episodes under way."""
        return sum(len(server.active) for server in self.servers.values())

    def pushing(self, request: EvaluateRequest) -> Server:
        """Return the record of the server that sent a request.

        Raises:
            ProblemError: another server has that name, or there are too many servers.
        """
        instance = fingerprint(request.instance_key) if request.instance_key else None
        # A server that was discovered, too, goes on under the name by which it was discovered.
        known = next((s for s in self.servers.values() if instance is not None and s.instance == instance), None)
        server = known or self.servers.get(request.server) or self._open(request.server)
        if server.instance != instance:
            if server.instance is not None and server.state is not ServerState.SILENT:
                raise ProblemError(
                    409,
                    f"another server is called {request.server!r} and was heard {server.age:.0f} s ago; give "
                    "ENVIRONMENT_SERVER_NAME another name, or wait until that one is silent",
                )
            self.lose(server)
        server.instance = instance
        server.heard = time.monotonic()
        server.mode = ServerMode.PUSHING
        server.environment = request.environment or server.environment
        return server

    def discovered(self, name: str, url: str, source: str) -> Server:
        """Return the record of a server that discovery found.

        Raises:
            ProblemError: there are too many servers.
        """
        server = self.servers.get(name) or self._open(name)
        server.url, server.source = url, source
        return server

    def identify(self, server: Server, instance: str) -> None:
        """Record the instance that answers at a discovered server's address.

        If that instance pushes under another name, the two records become one, under the discovered name.
        """
        pushed = next((s for s in self.servers.values() if s.instance == instance and s.url is None), None)
        if pushed is not None:
            self._merge(pushed, server)
        server.instance = instance

    def twin(self, server: Server) -> Server | None:
        """Return another discovered server that is the same instance at another address."""
        others = (s for s in self.servers.values() if s is not server and s.url is not None)
        return next((s for s in others if s.instance == server.instance), None)

    def vanished(self, name: str) -> None:
        """Record that a discovered server is gone. A server that pushes stays as long as it does."""
        server = self.servers[name]
        server.url = server.source = server.found = server.detail = None
        if server.mode is not ServerMode.PUSHING:
            self._remove(server)

    def played(self, server: Server, policy: str, positions: Iterable[EpisodePosition], states: int) -> None:
        """Record that states of a server were answered, at these positions of its episodes."""
        server.policy = policy
        server.requests += 1
        server.states += states
        server.heard = time.monotonic()
        self._meter.count_states(states)
        STATES.labels(policy).inc(states)
        for position in positions:
            if position.episode not in server.ended:
                server.active[position.episode] = server.heard
                server.active.move_to_end(position.episode)
                if len(server.active) > MAX_ACTIVE:
                    self.lose(server, [next(iter(server.active))])

    def finish(self, server: Server, report: FinishedEpisode, policy: str) -> None:
        """Count an episode's end, unless it was reported before."""
        if report.episode in server.ended:
            self.repeated += 1
            return
        server.ended[report.episode] = None
        if len(server.ended) > KEPT_ENDED:
            server.ended.popitem(last=False)
        server.active.pop(report.episode, None)
        server.steps += report.steps
        for returns in (server.returns, self.returns, self.newest_returns):
            returns.add(Moments(1, report.episode_return))
        FINISHED.labels(policy).inc()

    def lose(self, server: Server, episodes: Iterable[str] | None = None) -> None:
        """Count episodes as lost, by default all that the server has under way."""
        for episode in list(server.active) if episodes is None else episodes:
            if server.active.pop(episode, None) is not None:
                server.lost += 1
                self.lost += 1
                LOST.inc()

    def drop_idle(self) -> None:
        """Count the episodes as lost that were not heard of for IDLE_SECONDS."""
        oldest = time.monotonic() - IDLE_SECONDS
        for server in self.servers.values():
            self.lose(server, [episode for episode, heard in server.active.items() if heard < oldest])

    def _open(self, name: str) -> Server:
        if len(self.servers) >= MAX_SERVERS:
            silent = [s for s in self.servers.values() if s.url is None and s.state is ServerState.SILENT]
            if not silent:
                raise ProblemError(429, f"{MAX_SERVERS} servers are connected already", {"Retry-After": "30"})
            self._remove(min(silent, key=lambda s: s.heard))
        server = self.servers[name] = Server(name)
        return server

    def _remove(self, server: Server) -> None:
        self.lose(server)
        del self.servers[server.name]

    def _merge(self, old: Server, new: Server) -> None:
        new.active.update(old.active)
        new.ended.update(old.ended)
        for count in ("requests", "states", "refused", "lost", "steps"):
            setattr(new, count, getattr(new, count) + getattr(old, count))
        new.returns.add(old.returns)
        new.mode, new.heard, new.policy = old.mode, old.heard, old.policy
        new.environment = old.environment or new.environment
        del self.servers[old.name]
