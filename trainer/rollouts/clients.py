"""The clients that the trainer and a collector of its own process share."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from services.clients.data import DataClient
from services.clients.environment import EnvironmentClient
from services.clients.gateway import GatewayClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient
from services.http.client import ServiceClient
from services.programs import Program
from services.run_page.activity import Activity
from services.weights.policy_store import ADAPTER_NAME
from trainer.config import SELF, Rollout, TrainerSettings
from trainer.rollouts.game import Opponent

if TYPE_CHECKING:
    from services.relay import Relay


@dataclass
class Clients:
    """A client of each service, for one event loop."""

    data: DataClient
    rewards: RewardClient
    replay: ReplayClient
    rollouts: RolloutClient
    gateway: GatewayClient | None = None
    """None where completions answer prompts."""
    environments: EnvironmentClient | None = None
    """None where no environment-server is played on."""
    opponent: Opponent | None = None
    """None where the model in training plays every seat."""
    relay: Relay | None = None
    """The agent of ROLLOUT=program; None for other rollouts."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    def of(cls, settings: TrainerSettings, vocab_size: int) -> Self:
        """Make the clients of the job group's services; prompts must have token ids below ``vocab_size``."""
        token, deadline = settings.token, settings.service_deadline_seconds
        return cls(
            DataClient(token=token, deadline=deadline),
            RewardClient(token=token, deadline=deadline),
            ReplayClient(token=token, deadline=deadline),
            RolloutClient(
                token=token,
                vocab_size=vocab_size,
                model_name=settings.model_name,
                max_concurrency=settings.generation_concurrency,
                deadline_seconds=settings.generation_deadline_seconds,
                seed_each_completion=settings.engine_deterministic,
                lora_path=ADAPTER_NAME if settings.lora_rank else None,
            ),
            None if settings.rollout is Rollout.COMPLETION else GatewayClient(token=token, deadline=deadline),
            EnvironmentClient(token=token, deadline=deadline) if settings.rollout is Rollout.ENVIRONMENT else None,
            None if settings.opponent == SELF else Opponent(settings),
            _relay(settings),
        )

    @property
    def services(self) -> list[ServiceClient | EnvironmentClient]:
        """The clients of the services that are healthy before a run begins."""
        optional = (self.gateway, self.environments)
        return [self.data, self.rewards, self.replay, *(client for client in optional if client is not None)]

    async def open(self) -> None:
        """Open the clients."""
        for client in (*self.services, self.rollouts):
            await self._stack.enter_async_context(client)
        if self.opponent is not None:
            await self._stack.enter_async_context(self.opponent)
        if self.relay is not None:
            await self._stack.enter_async_context(self.relay)

    async def wait_healthy(self, deadline_seconds: float, activity: Activity | None = None) -> None:
        """Wait until all services but the rollout workers are healthy, and the opponent answers; tell ``activity``.

        Raises:
            ConfigurationError: the opponent refuses.
            DependencyLostError: one of them is not within ``deadline_seconds``.
        """
        awaited = (*self.services, *([self.opponent] if self.opponent else []))
        names = ", ".join(getattr(client, "task", "opponent") for client in awaited)
        activity = activity or Activity()
        activity.begin(f"waiting for {names}", seconds=deadline_seconds)
        await activity.gather((service.wait_healthy(deadline_seconds) for service in awaited), "healthy")

    async def close(self) -> None:
        """Close the clients."""
        await self._stack.aclose()


def _relay(settings: TrainerSettings) -> Relay | None:
    if settings.rollout is not Rollout.PROGRAM:
        return None
    # A collector that needs no web server is smaller by its modules.
    from services.relay import Relay

    return Relay(Program(settings.agent_command))
