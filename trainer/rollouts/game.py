"""ROLLOUT=environment: games with the model in training at one seat or at all; most environments have one seat.

A game is an episode on an environment-server whose seats are played at the same time. The opponent plays the seats that
are not trained.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from statistics import fmean
from typing import Any, Self

import httpx
from pydantic import BaseModel, Field

from services.agents import AgentFailedError, Example
from services.clients.environment import EnvironmentClient, ServedEpisode
from services.clients.gateway import GatewayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import Stopwatch
from services.http.client import HttpClient, RequestRefusedError, problem_detail
from services.protocol.chat import ChatReply
from services.protocol.evaluation import ActionKind, EnvironmentInfo, State, StateKind, StepStatus
from services.protocol.prompts import Prompt
from services.protocol.sessions import END_BEFORE, CreateSessionRequest
from trainer.config import SELF, TrainerSettings
from trainer.rollouts.episodes import Episodes, Outcome, gateway_client
from trainer.rollouts.groups import Answers

Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]
"""Returns a model's answer to a conversation."""

TRUNCATE_BEFORE = "end the episode before with truncated=True, set ENVIRONMENT_MAX_STEPS, or raise this setting"
"""The advice in place of END_BEFORE, because an environment has no loop of its own."""
COMMON_FAILURES = (DependencyLostError, RequestRefusedError, AgentFailedError)
"""Failures of the game itself, which are the same for each seat. Any other is the failure of one seat's model."""


class Seat:
    """One side of a game: its conversation, its rewards, and the environment's figures of its actions."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """The environment's messages, and the answers that the environment did not take."""
        self.episode_return = 0.0
        self.turn_rewards: list[float] = []
        """One reward an answer. A reward for another seat's action counts for the answer before it."""
        self.figures: defaultdict[str, list[float]] = defaultdict(list)
        self._view: list[dict[str, Any]] = []

    def see(self, state: State) -> None:
        """Take in the environment's view of the game."""
        assert isinstance(state, list)
        before, self._view = self._view, list(state)
        continues = state[: len(before)] == before
        self.messages = [*self.messages, *state[len(before) :]] if continues else list(state)

    def refuse(self, text: str, why: str) -> None:
        """Note an answer that the environment did not take: a turn without a reward."""
        self.messages = [*self.messages, {"role": "assistant", "content": text}, {"role": "user", "content": why}]
        self.turn_rewards.append(0.0)

    def credit(self, reward: float, *, has_acted: bool) -> None:
        """Add a reward."""
        self.episode_return += reward
        if has_acted:
            self.turn_rewards.append(reward)
        elif self.turn_rewards:
            self.turn_rewards[-1] += reward


class Game:
    """A game whose seats wait for each other's moves. If one of them fails, the others fail, too.

    An async context manager, which ends the episode on its server. The first seat that plays begins it.
    """

    def __init__(self, environments: EnvironmentClient, prompt: Prompt) -> None:
        self._environments = environments
        self._prompt = prompt
        self._episode: ServedEpisode | None = None
        self._beginning = asyncio.Lock()
        self._seats: defaultdict[int, Seat] = defaultdict(Seat)
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._opponents: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for opponent in self._opponents:
            opponent.cancel()
        await asyncio.gather(*self._opponents, return_exceptions=True)
        if self._episode is not None:
            await self._environments.end(self._episode)

    def seat_opponent(self, seat: int, ask: Ask) -> None:
        """Let another model than the one in training play a seat."""
        self._opponents.append(asyncio.create_task(self._play(seat, ask, Stopwatch())))

    async def answer(
        self, seat: int, example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient
    ) -> float:
        """Play a seat with the model at ``base_url``, as an agent, and return the sum of the seat's rewards.

        ``example.turn_rewards`` gets the reward of each answer, and ``example.figures`` means over the seat's actions.

        Raises:
            AgentFailedError: the environment is not of text, the episode was lost, or another seat failed.
            httpx.HTTPStatusError: the gateway refused a call over a limit of the session.
        """

        async def ask(messages: list[dict[str, Any]]) -> str:
            body = {"model": example.model, "messages": messages}
            headers = {"Authorization": f"Bearer {api_key}"}
            reply = await http_client.post(f"{base_url}/chat/completions", json=body, headers=headers)
            if reply.is_error:
                detail = problem_detail(reply).replace(END_BEFORE, TRUNCATE_BEFORE)
                raise httpx.HTTPStatusError(detail, request=reply.request, response=reply)
            return reply.json()["choices"][0]["message"]["content"] or ""

        try:
            await self._play(seat, ask, example.waits)
        except RequestRefusedError as error:
            raise AgentFailedError(str(error), "refused") from error
        except DependencyLostError as error:
            raise AgentFailedError(str(error), "server") from error
        record = self._seats[seat]
        example.turn_rewards = record.turn_rewards
        example.figures = {name: fmean(values) for name, values in record.figures.items()}
        return record.episode_return

    async def _play(self, seat: int, ask: Ask, waits: Stopwatch) -> None:
        """Answer whenever it is the seat's turn, until the game is over; ``waits`` runs while it is another's."""
        try:
            episode = await self._begun()
            while await self._is_turn_of(seat, episode, waits):
                self._seats[seat].see(episode.state)
                text = await ask(self._seats[seat].messages)
                await self._act(seat, episode, text)
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            self._changed.set()

    async def _begun(self) -> ServedEpisode:
        async with self._beginning:
            if self._episode is None:
                prompt = self._prompt
                self._episode = await self._environments.begin(_seed_of(prompt), _split_of(prompt), prompt.source)
                _check(self._episode.environment)
            return self._episode

    async def _is_turn_of(self, seat: int, episode: ServedEpisode, waits: Stopwatch) -> bool:
        """Wait until it is the seat's turn, and return True; return False once the game is over."""
        while not episode.has_ended:
            if isinstance(self._failure, COMMON_FAILURES):
                raise self._failure
            if self._failure is not None:
                raise AgentFailedError(f"another seat failed: {self._failure!r}", "opponent") from self._failure
            if episode.seat == seat:
                return True
            self._changed.clear()
            with waits.running():
                await self._changed.wait()
        return False

    async def _act(self, seat: int, episode: ServedEpisode, text: str) -> None:
        result = await self._environments.step(episode, text)
        if result.status is StepStatus.LOST:
            raise AgentFailedError(str(result.detail), "environment" if result.environment_failed else "lost")
        if result.status is StepStatus.REFUSED:
            self._seats[seat].refuse(text, result.detail or "The action was refused.")
            return
        episode.follow(result)
        for number, reward in enumerate(result.rewards or [result.reward]):
            self._seats[number].credit(reward, has_acted=number == seat)
        for name, value in result.figures.items():
            self._seats[seat].figures[name].append(value)
        self._changed.set()


def _check(info: EnvironmentInfo) -> None:
    if info.state.kind is not StateKind.MESSAGES or info.action.kind is not ActionKind.TEXT:
        raise AgentFailedError(
            f"ENVIRONMENT {info.id!r} has states of {info.state.kind} and actions of {info.action.kind}; a language "
            "model plays environments of messages and text",
            "environment",
        )


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
        return [_seed_of(prompt) % seats]  # so the seed chooses

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


def _seed_of(prompt: Prompt) -> int:
    if not (prompt.ground_truth.isascii() and prompt.ground_truth.isdecimal()):
        raise AgentFailedError(
            f"prompt {prompt.id} has the ground truth {prompt.ground_truth[:60]!r} in place of a seed; "
            "set DATASET=seeds or harbor:DIR for ROLLOUT=environment",
            "seed",
        )
    return int(prompt.ground_truth) % 2**31


def _split_of(prompt: Prompt) -> str | None:
    """Return the split that the prompt's id names, as in ``seeds/train/17``."""
    parts = prompt.id.split("/")
    return parts[-2] if len(parts) > 1 else None
