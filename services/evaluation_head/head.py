"""The head as a whole: policies, accounts, discovery, driver, statistics, and how a request passes through them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.evaluation_head import skypilot
from services.evaluation_head.discovery import Addresses, Discovery, Source
from services.evaluation_head.driver import Driver
from services.evaluation_head.language_policy import LanguagePolicy
from services.evaluation_head.policy import OverloadedError, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.registry import Accounts, NameTakenError, TooManyServersError
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.statistics import History, Meter
from services.http.problems import ProblemError
from services.protocol import Health
from services.protocol.evaluation import EvaluateReply, EvaluateRequest

log = get_logger(__name__)

SERVICE = "evaluation-head"
TICK_SECONDS = 1.0


class Head:
    """What the routes serve from."""

    def __init__(self, settings: HeadSettings, sources: list[Source] | None = None) -> None:
        self.settings = settings
        self.policies: dict[str, Policy] = {}
        self.accounts = Accounts(
            silent_seconds=settings.head_silent_seconds, idle_seconds=settings.head_episode_idle_seconds
        )
        self.meter = Meter()
        self.history = History()
        self.driver = Driver(settings, self.policies, self.accounts, self.meter)
        self.discovery = Discovery(
            _sources(settings) if sources is None else sources,
            prefix=settings.game_server_prefix if settings.skypilot_api_server_endpoint else None,
            interval=settings.discovery_seconds,
            timeout=settings.discovery_timeout_seconds,
            on_change=self.driver.update,
        )
        self._started = time.monotonic()
        self._before = (0, 0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads the policies; plays and discovers until the context ends.

        Raises:
            ConfigurationError: there is no policy, or one cannot be loaded.
        """
        settings = self.settings
        if not settings.policies:
            raise ConfigurationError(
                "HEAD_POLICIES is empty: name a policy, as --policies cartpole=policies/cartpole or "
                "--policies llm=http://rollout-server:30000"
            )
        if settings.head_drive_policy is not None and settings.head_drive_policy not in settings.policies:
            raise ConfigurationError(
                f"HEAD_DRIVE_POLICY is {settings.head_drive_policy!r}; allowed is one of {list(settings.policies)}"
            )
        async with AsyncExitStack() as stack:
            for name, target in settings.policies.items():
                self.policies[name] = await stack.enter_async_context(_policy(name, target, settings))
            tasks = [asyncio.create_task(self.discovery.run()), asyncio.create_task(self._tick())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                await self.driver.close()

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Actions for a request's states.

        Raises:
            ProblemError: they are not to be had.
        """
        started = time.monotonic()
        policy = self._policy(request.policy)
        try:
            server = self.accounts.pushing(request)
        except NameTakenError as error:
            raise ProblemError(409, str(error)) from error
        except TooManyServersError as error:
            raise ProblemError(429, str(error), {"Retry-After": "30"}) from error
        for report in request.finished:
            self.accounts.finish(server, report, policy.name)
        states = request.all_states
        try:
            decisions = await policy.act(states) if states else []
        except StatesRefusedError as error:
            server.refused += 1
            self.meter.refused += 1
            raise ProblemError(422, str(error)) from error
        except OverloadedError as error:
            self.meter.overloaded += 1
            raise ProblemError(
                429, f"{error}; ask again after Retry-After", {"Retry-After": str(error.retry_after)}
            ) from error
        except PolicyFailedError as error:
            raise ProblemError(500, str(error)) from error
        self.accounts.played(server, policy.name, len(states), request.episodes or ())
        self.meter.answered(len(states), time.monotonic() - started)
        actions = [decision.action for decision in decisions]
        return EvaluateReply.model_construct(
            policy=policy.name,
            policy_versions=[decision.version for decision in decisions],
            actions=actions,
            action=actions[0] if request.state is not None else None,
        )

    def _policy(self, name: str | None) -> Policy:
        if name is None:
            return next(iter(self.policies.values()))
        if name not in self.policies:
            raise ProblemError(404, f"no policy {name!r} here; there are {list(self.policies)}")
        return self.policies[name]

    @property
    def health(self) -> Health:
        """Unhealthy when a policy does not come back."""
        hung = [name for name, policy in self.policies.items() if getattr(policy, "is_hung", False)]
        about = {"policies": list(self.policies), **({"hung": hung} if hung else {})}
        return Health(status="unhealthy" if hung else "healthy", service=SERVICE, **about)

    def stats(self) -> dict[str, Any]:
        """The content of GET /stats, and of what /ws sends."""
        accounts = self.accounts
        return {
            "time": time.time(),
            "uptime_seconds": round(time.monotonic() - self._started, 1),
            **self.meter.window(),
            "requests": self.meter.requests,
            "states": accounts.states,
            "refused": self.meter.refused,
            "overloaded": self.meter.overloaded,
            "episodes": {
                "active": accounts.active,
                "finished": accounts.finished,
                "lost": accounts.lost,
                "reported_again": accounts.repeated,
            },
            "returns": accounts.returns.as_dict(),
            "policies": [
                {"name": name, "kind": policy.kind, "trouble": policy.trouble, **policy.stats()}
                for name, policy in self.policies.items()
            ],
            "servers": accounts.rows(),
            "discovery": self.discovery.reply().model_dump(),
        }

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.accounts.drop_idle()
            self.history.add(self._point())

    def _point(self) -> dict[str, Any]:
        window, now = self.meter.window(), time.time()
        batches = sum(p.stats().get("batches", 0) for p in self.policies.values())
        states = sum(p.stats().get("states", 0) for p in self.policies.values() if "batches" in p.stats())
        new_batches, new_states = batches - self._before[0], states - self._before[1]
        self._before = (batches, states)
        ended = [value for moment, value in self.accounts.recent if moment > now - TICK_SECONDS]
        return {
            "time": now,
            "requests_per_second": window["requests_per_second"],
            "states_per_second": window["states_per_second"],
            "latency_p50": window["latency_ms"]["p50"],
            "latency_p95": window["latency_ms"]["p95"],
            "batch_size": new_states / new_batches if new_batches else None,
            "active": self.accounts.active,
            "finished": self.accounts.finished,
            "mean_return": sum(ended) / len(ended) if ended else None,
        }


def _policy(name: str, target: str, settings: HeadSettings) -> Policy:
    if "://" in target:
        return LanguagePolicy(name, target, settings)
    # Torch takes seconds to load, and a head of language models alone needs none.
    from services.evaluation_head.torch_policy import TorchPolicy

    return TorchPolicy(name, Path(target), settings)


def _sources(settings: HeadSettings) -> list[Source]:
    sources: list[Source] = []
    if settings.addresses:
        sources.append(Addresses(settings.addresses))
    if settings.skypilot_api_server_endpoint is not None:
        sources.append(skypilot.Clusters(settings.game_server_prefix, settings.game_server_port))
        sources.append(skypilot.Services(settings.game_server_prefix))
    return sources
