"""The head: policies, registry, discovery, driver and statistics, and how a request passes through them.

Discovery asks each of its sources for environment servers: a list of addresses, SkyPilot's clusters, SkyServe's
services. SkyPilot's SDK reads SKYPILOT_API_SERVER_ENDPOINT and SKYPILOT_SERVICE_ACCOUNT_TOKEN from the environment by
itself. It raises the API server's errors, those of its HTTP library, and ImportError where it is not installed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head.driver import Driver
from services.evaluation_head.policies import make_policy
from services.evaluation_head.policy import OverloadedError, Policy
from services.evaluation_head.registry import History, Meter, Moments, Registry
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.sky_servers import find_clusters, find_replicas
from services.http.problems import ProblemError
from services.protocol.evaluation import DiscoveredServer, DiscoveryReply, EvaluateReply, EvaluateRequest

log = get_logger(__name__)

SERVICE = "evaluation-head"
TICK_SECONDS = 1.0
RELOAD_SECONDS = 5.0
"""Time between two searches for new policy versions."""
INTERVAL_SECONDS = 30.0
"""Time between two searches for servers: a new one takes minutes to start, SkyPilot's API server seconds to answer."""
TIMEOUT_SECONDS = 60.0
"""Limit of one source's answer."""

Source = Callable[[], list[DiscoveredServer]]
"""Returns the present servers; may block. Raises an error of any type if it cannot find out."""


def servers_at(urls: Sequence[str]) -> list[DiscoveredServer]:
    """Return the servers at some addresses, whether or not they are up."""
    return [DiscoveredServer(name=urlsplit(url).netloc, source="address", status="given", url=url) for url in urls]


class Discovery:
    """Asks the sources at an interval and on demand. A source that fails keeps its former servers."""

    def __init__(self, settings: HeadSettings, on_change: Callable[[list[DiscoveredServer]], None]) -> None:
        self._on_change = on_change
        self._prefixes = settings.prefixes if settings.skypilot_api_server_endpoint else ()
        self._sources: dict[str, Source] = {}
        if settings.addresses:
            self._sources["addresses"] = partial(servers_at, settings.addresses)
        if self._prefixes:
            self._sources["clusters"] = partial(find_clusters, self._prefixes, settings.game_server_port)
            self._sources["services"] = partial(find_replicas, self._prefixes)
        self._servers_of: dict[str, list[DiscoveredServer]] = {}
        self._errors: dict[str, str] = {}
        self._asked: float | None = None
        self._pending: dict[str, asyncio.Future[list[DiscoveredServer]]] = {}

    def reply(self) -> DiscoveryReply:
        """Return the servers of the last search."""
        return DiscoveryReply(
            enabled=bool(self._sources),
            prefix=", ".join(self._prefixes) or None,
            servers=self.servers,
            errors=dict(self._errors),
            age_seconds=None if self._asked is None else round(time.monotonic() - self._asked, 1),
        )

    @property
    def servers(self) -> list[DiscoveredServer]:
        """All servers. If two have the same name, the server of the first source counts."""
        servers: dict[str, DiscoveredServer] = {}
        for source in self._sources:
            for server in self._servers_of.get(source, []):
                servers.setdefault(server.name, server)
        return list(servers.values())

    async def run(self) -> None:
        """Look for servers at the interval until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def look(self) -> None:
        """Ask all sources."""
        await asyncio.gather(*(self._ask(name, source) for name, source in self._sources.items()))
        self._asked = time.monotonic()
        self._on_change(self.servers)

    async def _ask(self, name: str, source: Source) -> None:
        # One call at a time: callers that come meanwhile wait for it, and a call that hangs cannot be ended.
        pending = self._pending.get(name)
        if pending is None or pending.done():
            pending = self._pending[name] = asyncio.ensure_future(in_background(source))
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._servers_of[name] = await asyncio.shield(pending)
        # SkyPilot's SDK may raise anything.
        except Exception as error:  # noqa: BLE001
            is_late = isinstance(error, TimeoutError)
            why = f"no answer within {TIMEOUT_SECONDS:g} s" if is_late else f"{type(error).__name__}: {error}"
            reason = f"{why}; needed: package skypilot, SKYPILOT_API_SERVER_ENDPOINT, SKYPILOT_SERVICE_ACCOUNT_TOKEN"
            if self._errors.get(name) != reason:
                log.warning("servers cannot be looked for", source=name, error=reason)
            self._errors[name] = reason
        else:
            self._errors.pop(name, None)


class Head:
    """The state behind the routes."""

    def __init__(self, settings: HeadSettings) -> None:
        self.settings = settings
        self.policies: dict[str, Policy] = {}
        self.meter = Meter()
        self.registry = Registry(self.meter)
        self.history = History()
        self.driver = Driver(settings, self.policies, self.registry)
        self.discovery = Discovery(settings, self.driver.update)
        self._batched = (0, 0)

    @asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncIterator[None]:
        """Load the policies; play and discover until the context ends.

        Raises:
            ConfigurationError: there is no policy, or a policy cannot be loaded.
        """
        settings = self.settings
        if not settings.policies:
            raise ConfigurationError(
                "HEAD_POLICIES is empty: name a policy, as --policies cartpole=policies/cartpole or "
                "--policies llm=http://rollout-server:30000"
            )
        async with AsyncExitStack() as stack:
            for name, target in settings.policies.items():
                self.policies[name] = await stack.enter_async_context(make_policy(name, target, settings))
            stack.push_async_callback(self.driver.close)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            tasks = [group.create_task(self.discovery.run()), group.create_task(self._tick())]
            tasks += [group.create_task(_keep_fresh(policy)) for policy in self.policies.values()]
            yield
            for task in tasks:
                task.cancel()

    async def evaluate(self, request: EvaluateRequest, array: NDArray[np.float32] | None = None) -> EvaluateReply:
        """Return actions for a request's states; ``array`` [count, *shape] has the states of a BinaryRequest.

        Raises:
            ProblemError: there is no such policy, the server's name is taken, or the policy gives no actions.
        """
        started = time.monotonic()
        policy = next(iter(self.policies.values())) if request.policy is None else self.policies.get(request.policy)
        if policy is None:
            raise ProblemError(404, f"no policy {request.policy!r} here; there are {list(self.policies)}")
        server = self.registry.pushing(request)
        for report in request.finished:
            self.registry.finish(server, report, policy.name)
        states: Sequence[Any] = request.all_states
        if array is not None:
            states = array if policy.takes_arrays else array.tolist()  # type: ignore[assignment]
        try:
            decisions = await policy.act(states, logprobs=request.logprobs) if len(states) else []
        except OverloadedError:
            self.meter.overloaded += 1
            raise
        seconds = time.monotonic() - started
        self.registry.played(server, policy.name, request.episodes or (), len(states), seconds)
        actions = [decision.action for decision in decisions]
        return EvaluateReply.model_construct(
            policy=policy.name,
            policy_versions=[decision.version for decision in decisions],
            actions=actions,
            action=actions[0] if request.state is not None else None,
            logprobs=[decision.logprob for decision in decisions] if request.logprobs else None,
        )

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats and of the messages that /ws sends."""
        registry = self.registry
        return {
            "time": time.time(),
            **self.meter.window(),
            "requests": self.meter.requests,
            "states": self.meter.states,
            "overloaded": self.meter.overloaded,
            "episodes": {
                "active": registry.active,
                "finished": registry.returns.count,
                "lost": registry.lost,
            },
            "returns": registry.returns.as_dict(),
            "policies": [
                {"name": name, "kind": policy.kind, "trouble": policy.trouble, **policy.stats()}
                for name, policy in self.policies.items()
            ],
            "servers": [server.row() for _, server in sorted(registry.servers.items())],
            "discovery": self.discovery.reply().model_dump(),
        }

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.registry.drop_idle()
            self.history.add(self._point())
            self.registry.newest_returns = Moments()

    def _point(self) -> dict[str, Any]:
        """Return the newest point of the dashboard's plots."""
        stats = self.stats()
        batching = [policy for policy in stats["policies"] if "batches" in policy]
        batched = (sum(policy["batches"] for policy in batching), sum(policy["states"] for policy in batching))
        batches, states = batched[0] - self._batched[0], batched[1] - self._batched[1]
        self._batched = batched
        return {
            "time": stats["time"],
            "requests_per_second": stats["requests_per_second"],
            "states_per_second": stats["states_per_second"],
            "latency_p50": stats["latency_ms"]["p50"],
            "latency_p95": stats["latency_ms"]["p95"],
            "batch_size": states / batches if batches else None,
            "active": stats["episodes"]["active"],
            "mean_return": self.registry.newest_returns.as_dict()["mean"],
        }


async def _keep_fresh(policy: Policy) -> None:
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        await policy.refresh()
