"""ROLLOUT=environment: games with the model in training at one seat or at all; most environments have one seat.

The opponent plays the seats that are not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, Field

from services.agents import AgentFailedError
from services.clients.environment import EnvironmentClient
from services.clients.games import Game, seed_of
from services.clients.gateway import GatewayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.chat import ChatReply
from services.protocol.prompts import Prompt
from services.protocol.sessions import CreateSessionRequest
from trainer.config import SELF, TrainerSettings
from trainer.rollouts.episodes import Episodes, Outcome, gateway_client
from trainer.rollouts.groups import Answers


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model] = Field(min_length=1)


class FixedModel(HttpClient):
    """The player of the seats that are not trained: the first model of the OpenAI endpoint that OPPONENT names.

    It gets no key: JOBGROUP_TOKEN must not leave the job group. Its answers have the trained policy's temperature and
    length limit.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        url = settings.opponent.rstrip("/").removesuffix("/v1")
        super().__init__(url, service="opponent", timeout=settings.agent_seconds, deadline=settings.agent_seconds)
        self._sampling = {"temperature": settings.temperature, "max_tokens": settings.max_new_tokens}
        self._naming = asyncio.Lock()
        self._model: str | None = None

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until the endpoint lists its models.

        Raises:
            ConfigurationError: it refuses to.
            DependencyLostError: it did not within ``deadline_seconds``.
        """
        try:
            await self._name(deadline_seconds)
        except RequestRefusedError as error:
            raise ConfigurationError(
                f"OPPONENT: {error}; it must be an OpenAI endpoint that asks for no key"
            ) from error

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """Return the model's answer.

        Raises:
            DependencyLostError: it did not answer within AGENT_SECONDS.
            RequestRefusedError: it refuses the conversation, or asks for a key.
        """
        body = {"model": await self._name(), "messages": messages, **self._sampling}
        reply = await self.call("POST", "/v1/chat/completions", ChatReply, body)
        return reply.choices[0].message.content or ""

    async def _name(self, deadline: float | None = None) -> str:
        async with self._naming:
            if self._model is None:
                self._model = (await self.call("GET", "/v1/models", _Models, deadline=deadline)).data[0].id
        return self._model


class Games(Episodes):
    """The model plays games of an environment; each seat that is trained is an episode with a session of its own."""

    advice = "see the logs of environment-server and gateway"

    def __init__(
        self,
        settings: TrainerSettings,
        rewards: RewardClient,
        gateway: GatewayClient,
        environments: EnvironmentClient,
        opponent: FixedModel | None,
    ) -> None:
        """Make the way; without an ``opponent`` the model plays every seat, and each is trained."""
        super().__init__(settings, rewards, gateway)
        self.services = [gateway, environments]
        self._environments = environments
        self._opponent = opponent
        self._counting = asyncio.Lock()
        self._seats: int | None = None

    @classmethod
    def of(cls, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> Self:
        """Make the clients of gateway, environment-servers and opponent."""
        environments = EnvironmentClient(token=settings.token, deadline=settings.service_deadline_seconds)
        opponent = None if settings.opponent == SELF else FixedModel(settings)
        return cls(settings, rewards, gateway_client(settings), environments, opponent)

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the clients."""
        await super().open(stack)
        if self._opponent is not None:
            await stack.enter_async_context(self._opponent)

    def awaited(self) -> dict[str, Callable[[float], Awaitable[None]]]:
        """Return the waits for the services and for the opponent."""
        return super().awaited() | ({"opponent": self._opponent.wait_healthy} if self._opponent else {})

    async def answer(
        self, prompt: Prompt, params: SamplingParams, n: int, seed: int, *, is_group: bool = False
    ) -> Answers:
        """Play ``n`` games of a prompt's seed; none if the prompt is not a seed or no environment-server answers."""
        try:
            await self._trained_seats(prompt)
        except RequestRefusedError as error:
            return Answers(error=AgentFailedError(str(error), "refused"))
        except (AgentFailedError, DependencyLostError) as error:
            return Answers(error=error)
        return await super().answer(prompt, params, n, seed, is_group=is_group)

    async def play(self, prompt: Prompt, n: int, request: Callable[[int], CreateSessionRequest]) -> list[Outcome]:
        """Play ``n`` games of a prompt's seed."""
        trained = await self._trained_seats(prompt)

        async def one(number: int) -> list[Outcome]:
            requests = [request(number * len(trained) + place) for place in range(len(trained))]
            return await self._game(prompt, dict(zip(trained, requests, strict=True)))

        return [episode for episodes in await asyncio.gather(*map(one, range(n))) for episode in episodes]

    async def _game(self, prompt: Prompt, requests: Mapping[int, CreateSessionRequest]) -> list[Outcome]:
        """Play a game; ``requests`` has the session of each trained seat."""
        seats = await self._count_seats(prompt)
        async with self._places, Game(self._environments, prompt) as game:
            if self._opponent is not None:
                for seat in set(range(seats)) - set(requests):
                    game.seat_opponent(seat, self._opponent.ask)
            return await asyncio.gather(
                *(
                    self._episode(partial(game.answer, seat), prompt, request, seat if seats > 1 else None)
                    for seat, request in requests.items()
                )
            )

    async def _trained_seats(self, prompt: Prompt) -> list[int]:
        """Return the seats of a prompt's games that are trained.

        Raises:
            AgentFailedError: the prompt is not a seed.
            ConfigurationError: the environment has no seat for the opponent.
            DependencyLostError: no environment-server answered.
        """
        seats = await self._count_seats(prompt)
        if self._opponent is None:
            return list(range(seats))
        if seats == 1:
            raise ConfigurationError("OPPONENT is set, but the environment has one seat; unset OPPONENT")
        return [seed_of(prompt) % seats]  # so the seed chooses

    async def _count_seats(self, prompt: Prompt) -> int:
        """Return the number of seats of the prompt's environment, from an episode that is begun and ended.

        Raises:
            DependencyLostError: no environment-server answered.
        """
        async with self._counting:
            if self._seats is None:
                episode = await self._environments.begin(0, source=prompt.source)
                await self._environments.end(episode)
                self._seats = episode.environment.seats
        return self._seats
