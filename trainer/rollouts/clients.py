"""The clients that the trainer and collectors have, and the success rates that both send to the data-server."""

from __future__ import annotations

import asyncio
import pkgutil
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from services.clients.data import DataClient
from services.clients.environment import EnvironmentClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.settings import Method
from services.http.client import RequestRefusedError, ServiceClient
from services.protocol.accuracy import verdicts
from services.protocol.groups import Group
from services.run_page.progress import Activity
from services.weights.policy_store import ADAPTER_NAME
from trainer.config import TrainerSettings
from trainer.rollouts.groups import Sampler

log = get_logger(__name__)

RECORD_SECONDS = 10.0
"""The longest wait for the data-server: the order of prompts is not worth more."""


class SuccessRates:
    """A sender of success rates, one batch of prompts a request. A failed request costs only these rates."""

    def __init__(self, data: DataClient, batch_size: int) -> None:
        self.data = data
        self.batch_size = batch_size
        self._rates: dict[str, float] = {}
        self._are_wanted: bool | None = None
        """True if the data-server has a curriculum; None before it was asked."""

    async def record(self, groups: Sequence[Group]) -> None:
        """Collect the rates of scored groups, and send them as soon as they cover one batch of prompts."""
        if self._are_wanted is False:
            return
        self._rates |= {g.prompt.id: rate for g in groups if (rate := success_rate(g)) is not None}
        if len(self._rates) < self.batch_size:
            return
        rates, self._rates = self._rates, {}
        try:
            async with asyncio.timeout(RECORD_SECONDS):
                if self._are_wanted is None:
                    self._are_wanted = (await self.data.stats()).curriculum != "off"
                if self._are_wanted:
                    await self.data.record_success_rates(rates)
        except (DependencyLostError, RequestRefusedError, TimeoutError) as error:
            log.warning("success rates not recorded", prompts=len(rates), reason=str(error) or "timed out")


def success_rate(group: Group) -> float | None:
    """Return the share of right completions among a group's judged ones; None if none was judged."""
    rights = verdicts([first.result for first, *_ in group.episodes if first.result is not None])
    return statistics.fmean(rights) if rights else None


@dataclass
class Clients:
    """A client of each service, and the run's way of rolling out with its own clients, for one event loop."""

    data: DataClient
    rewards: RewardClient
    replay: ReplayClient
    rollouts: RolloutClient
    samplers: Mapping[str, Sampler]
    """The way of rolling out of each source by its name; "" without SOURCES."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    def of(cls, settings: TrainerSettings, vocab_size: int) -> Self:
        """Make the clients of the job group's services; prompts must have token ids below ``vocab_size``.

        Raises:
            ConfigurationError: AGENT cannot be imported.
        """
        token, deadline = settings.token, settings.service_deadline_seconds
        rewards = RewardClient(token=token, deadline=deadline)
        rollouts = RolloutClient(
            token=token,
            vocab_size=vocab_size,
            model_name=settings.model_name,
            max_concurrency=settings.generation_concurrency,
            deadline_seconds=max(own.generation_deadline_seconds for own in settings.by_source().values()),
            seed_each_completion=settings.engine_deterministic,
            lora_path=ADAPTER_NAME if settings.lora_rank else None,
        )
        return cls(
            DataClient(token=token, deadline=deadline),
            rewards,
            ReplayClient(token=token, deadline=deadline),
            rollouts,
            {
                source: pkgutil.resolve_name(own.way.sampler).of(own, rollouts, rewards)
                for source, own in settings.by_source().items()
            },
        )

    @property
    def _shared(self) -> list[ServiceClient]:
        all_settings = [sampler.settings for sampler in self.samplers.values()]
        rewards = [self.rewards] if any(settings.needs_rewards for settings in all_settings) else []
        replay = [self.replay] if any(settings.method is Method.RL for settings in all_settings) else []
        return [self.data, *rewards, *replay]

    @property
    def asked(self) -> dict[str, Sampler]:
        """The samplers that answer prompts, by source."""
        return {source: sampler for source, sampler in self.samplers.items() if sampler.settings.needs_engines}

    @property
    def services(self) -> list[ServiceClient | EnvironmentClient]:
        """The clients of the services that are healthy before a run begins."""
        of_samplers = (client for sampler in self.asked.values() for client in sampler.services)
        return [*self._shared, *of_samplers]

    async def open(self) -> None:
        """Open the clients."""
        for client in (self.data, self.rewards, self.replay, self.rollouts):
            await self._stack.enter_async_context(client)
        for sampler in self.samplers.values():
            await sampler.open(self._stack)

    async def wait_healthy(self, deadline_seconds: float, activity: Activity | None = None) -> None:
        """Wait until all services but the rollout workers are healthy, and opponent and teacher answer.

        ``activity`` shows the wait.

        Raises:
            ConfigurationError: the opponent refuses, or the teacher cannot teach this student.
            DependencyLostError: one of them is not within ``deadline_seconds``.
        """
        awaited: dict[str, Callable[[float], Awaitable[None]]]
        awaited = {client.task.value: client.wait_healthy for client in self._shared}
        for source, sampler in self.asked.items():
            awaited |= {f"{name} of {source}" if source else name: wait for name, wait in sampler.awaited().items()}
        activity = activity or Activity()
        activity.begin(f"waiting for {', '.join(awaited)}", seconds=deadline_seconds)
        await activity.gather((wait(deadline_seconds) for wait in awaited.values()), "healthy")

    async def close(self) -> None:
        """Close the clients."""
        await self._stack.aclose()
