"""Agents that play on environment-servers: a model with an environment's seats, and a program in the box of its task.

A game is an episode on an environment-server whose seats are played at the same time.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from statistics import fmean
from typing import Any, Self, TypeVar

import httpx

from services.agents import AgentFailedError, Example
from services.clients.environment import EnvironmentClient, ServedEpisode
from services.core.errors import DependencyLostError
from services.core.settings import EpisodeLimits
from services.core.tasks import Stopwatch
from services.http.client import RequestRefusedError, problem_detail
from services.protocol import evaluation as wire
from services.protocol.prompts import Prompt
from services.protocol.sessions import END_BEFORE

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

    def see(self, state: wire.State) -> None:
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

        await _reached(self._play(seat, ask, example.waits))
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
                split = prompt.id.split("/")[-2] if "/" in prompt.id else None  # as in seeds/train/17
                self._episode = await self._environments.begin(seed_of(prompt), split, prompt.source)
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
        result = _not_lost(await self._environments.step(episode, text))
        if result.status is wire.StepStatus.REFUSED:
            self._seats[seat].refuse(text, result.detail or "The action was refused.")
            return
        episode.follow(result)
        for number, reward in enumerate(result.rewards or [result.reward]):
            self._seats[number].credit(reward, has_acted=number == seat)
        for name, value in result.figures.items():
            self._seats[seat].figures[name].append(value)
        self._changed.set()


def _check(info: wire.EnvironmentInfo) -> None:
    if info.state.kind is not wire.StateKind.MESSAGES or info.action.kind is not wire.ActionKind.TEXT:
        kinds = f"states of {info.state.kind} and actions of {info.action.kind}"
        remedy = "a language model plays environments of messages and text"
        raise AgentFailedError(f"ENVIRONMENT {info.id!r} has {kinds}; {remedy}", "environment")


class ToolAgent:
    """The model at the only seat of an environment, as an agent: the programs that it writes run in its task's box."""

    def __init__(self, environments: EnvironmentClient) -> None:
        self._environments = environments

    async def __call__(self, example: Example, **endpoint: Any) -> float:
        """Play the episode of the example's seed; raises as ``Game.answer``."""
        async with Game(self._environments, example) as game:
            return await game.answer(0, example, **endpoint)


class BoxedProgram:
    """AGENT_COMMAND as an agent, which runs in the box of its task and is graded by the task's tests."""

    def __init__(
        self,
        command: str,
        limits: EpisodeLimits,
        max_turn_tokens: int,
        environments: EnvironmentClient,
        *,
        patience: float,
    ) -> None:
        """Make the agent; a call is sent again for ``patience`` seconds while the gateway is away."""
        self._environments = environments
        self._fields: dict[str, Any] = {
            "command": command,
            "seconds": limits.agent_seconds,
            "patience": patience,
            "max_turns": limits.agent_max_turns,
            "max_turn_tokens": max_turn_tokens,
        }

    async def __call__(self, example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
        """Play the example's task, and return the reward of its tests; ``example.figures`` gets their other numbers.

        Raises:
            AgentFailedError: the episode was lost, or its program was ended because the gateway refused a call.
        """
        task = json.loads(example.for_program())
        request = wire.ProgramRequest(base_url=base_url, api_key=api_key, example=task, **self._fields)
        episode = await _reached(self._environments.begin(seed_of(example), wire.PROGRAM, example.source))
        # On another server the program would make its calls once more, in the same session.
        episode.environment = episode.environment.model_copy(update={"deterministic": False})
        try:
            status = wire.StepStatus.REFUSED
            while status is wire.StepStatus.REFUSED:
                result = await _reached(self._environments.step(episode, request.model_dump_json()))
                status = _not_lost(result).status
            episode.follow(result)
        finally:
            await self._environments.end(episode)
        if status is wire.StepStatus.TRUNCATED:
            raise AgentFailedError(str(result.state[-1]["content"]))  # type: ignore[index]  # and the gateway says why
        example.figures = dict(result.figures)
        return result.reward


T = TypeVar("T")


async def _reached(work: Awaitable[T]) -> T:
    """Return the answer of environment-servers.

    Raises:
        AgentFailedError: they refused the episode, or did not answer.
    """
    try:
        return await work
    except RequestRefusedError as error:
        raise AgentFailedError(str(error), "refused") from error
    except DependencyLostError as error:
        raise AgentFailedError(str(error), "server") from error


def _not_lost(result: wire.StepResult) -> wire.StepResult:
    if result.status is wire.StepStatus.LOST:
        raise AgentFailedError(str(result.detail), "environment" if result.environment_failed else "lost")
    return result


def seed_of(prompt: Prompt) -> int:
    """Return the seed of a prompt's episode.

    Raises:
        AgentFailedError: the prompt is not a seed.
    """
    if not (prompt.ground_truth.isascii() and prompt.ground_truth.isdecimal()):
        fault = f"prompt {prompt.id} has the ground truth {prompt.ground_truth[:60]!r} in place of a seed"
        raise AgentFailedError(f"{fault}; set DATASET=seeds or harbor:DIR for ROLLOUT=environment", "seed")
    return int(prompt.ground_truth) % 2**31
