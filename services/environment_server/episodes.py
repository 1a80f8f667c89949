"""The episodes that a server holds. A repeated step is not taken again but gets the same result."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge
from pydantic import BaseModel

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.environment_server.catalogue import Environment, MakeEnvironment
from services.environment_server.environments import (
    ActionRefusedError,
    Conversation,
    EnvironmentBrokenError,
    EnvironmentHungError,
    Transition,
    why_failed,
)
from services.environment_server.runner import Runner
from services.http.problems import ProblemError
from services.protocol import evaluation as wire

log = get_logger(__name__)

BEGUN = Counter("environment_episodes_begun", "Episodes begun.")
ENDED = Counter("environment_episodes_ended", "Episodes ended, by how.", ["how"])
STEPS = Counter("environment_steps", "Actions taken.")
ACTIVE = Gauge("environment_episodes_active", "Episodes held now.")
_COUNTERS = {"begun": BEGUN, "steps": STEPS}
_COUNTERS |= {how: ENDED.labels(how) for how in ("terminated", "truncated", "lost", "closed")}

MAX_EPISODES = 1024
"""Episodes held at once: as many as one /reset may begin. It bounds the memory that clients can take."""
MAX_STUCK = 8
"""More hung threads than this make the server unhealthy: only a restart frees them."""
KEPT_ENDED = 10_000
"""Ended episodes of which the last result is kept for clients that ask for it again."""


Hosted = tuple[MakeEnvironment, wire.EnvironmentInfo]
"""A function that makes the environment of an episode, and the environment's description."""


@dataclass
class HeldEpisode:
    """An episode that the server holds and that can be stepped."""

    id: str
    environment: Environment
    info: wire.EnvironmentInfo
    used: float
    steps: int = 0
    episode_return: float = 0.0
    last: wire.StepResult | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a step is taken."""

    def result(self, status: wire.StepStatus, **members: Any) -> wire.StepResult:
        """Return a result with the episode's steps and return so far."""
        so_far = {"steps": self.steps, "episode_return": self.episode_return}
        return wire.StepResult(episode=self.id, status=status, **so_far, **members)


class EpisodeTable:
    """All episodes of a server.

    Args:
        info: the description of the environment of the episodes for which ``reset`` gets no other.
        make: makes that environment for the episode of a seed.
        step_seconds: the limit of one reset or step.
    """

    def __init__(self, info: wire.EnvironmentInfo, make: MakeEnvironment, step_seconds: float) -> None:
        self.info = info
        self.instance = secrets.token_hex(16)
        """Tells this table from those of other servers and of former processes."""
        self.make = make
        self._runner = Runner(step_seconds)
        self.active: dict[str, HeldEpisode] = {}
        self.sockets = 0
        """Sockets of OpenEnv's clients that are open."""
        self._beginning = 0
        self._ended: OrderedDict[str, wire.StepResult] = OrderedDict()
        self.counts = dict.fromkeys(_COUNTERS, 0)

    @property
    def stuck(self) -> int:
        """Environments that hang."""
        return self._runner.stuck

    async def reset(self, count: int, seed: int | None, hosted: Hosted | None = None) -> wire.ResetReply:
        """Begin ``count`` episodes, the i-th with ``seed`` + i; without a seed, draw one.

        They are of the table's environment, unless another one is ``hosted``.

        Raises:
            ProblemError: the table has no room for the episodes, or the environment fails.
        """
        if self.stuck > MAX_STUCK:
            raise ProblemError(503, f"{self.stuck} environments hang; this server has to be restarted")
        free = MAX_EPISODES - len(self.active) - self._beginning
        if count > free:
            detail = (
                f"{count} episodes asked for, {max(free, 0)} of {MAX_EPISODES} free; end some, or ask another server"
            )
            raise ProblemError(429, detail, {"Retry-After": "1"})
        first = secrets.randbelow(2**31) if seed is None else seed
        make, info = hosted or (self.make, self.info)
        self._beginning += count
        try:
            starts = await self._begin([(first + i) % 2**31 for i in range(count)], make, info)
        finally:
            self._beginning -= count
        return wire.ResetReply.model_construct(environment=info, episodes=starts, instance=self.instance)

    async def _begin(
        self, seeds: Sequence[int], make: MakeEnvironment, info: wire.EnvironmentInfo
    ) -> list[wire.EpisodeStart]:
        environments: dict[int, Environment] = {}

        def begin(seed: int) -> wire.State | Awaitable[wire.State]:
            environments[seed] = make(seed)
            return environments[seed].reset(seed)

        states = await self._runner.run([partial(begin, seed) for seed in seeds])
        outcomes = [_start_of(info, seed, state) for seed, state in zip(seeds, states, strict=True)]
        starts = [outcome for outcome in outcomes if isinstance(outcome, wire.EpisodeStart)]
        if len(starts) < len(seeds):
            for seed, outcome in zip(seeds, outcomes, strict=True):
                if seed in environments and not isinstance(outcome, EnvironmentHungError):
                    self.release(environments[seed])
            error = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
            if isinstance(error, ProblemError):
                raise error
            detail = f"{info.id!r} cannot be begun: {why_failed(error)}"
            if isinstance(error, DependencyLostError):
                raise ProblemError(503, detail, {"Retry-After": "5"})
            raise ProblemError(422, detail)
        for start in starts:
            self.active[start.episode] = HeldEpisode(start.episode, environments[start.seed], info, time.monotonic())
            self._count("begun")
        return starts

    async def step(self, items: Sequence[wire.StepItem]) -> list[wire.StepResult]:
        """Return one result an item, in order; a failure of one episode does not affect the others."""
        # In another task, so that a client that disconnects does not leave episodes half stepped.
        return await asyncio.shield(asyncio.ensure_future(self._step(items)))

    async def _step(self, items: Sequence[wire.StepItem]) -> list[wire.StepResult]:
        async with AsyncExitStack() as stack:
            # Sorted, so that two requests for the same episodes never wait for each other.
            for episode_id in sorted(item.episode for item in items):
                if episode_id in self.active:
                    await stack.enter_async_context(self.active[episode_id].lock)
            without_step = {item.episode: self._result_without_step(item) for item in items}
            steps = [(self.active[item.episode], item.action) for item in items if without_step[item.episode] is None]
            outcomes = await self._runner.run([partial(episode.environment.step, action) for episode, action in steps])
            results = [self._result_of(e, outcome) for (e, _), outcome in zip(steps, outcomes, strict=True)]
            self._count("steps", sum(isinstance(result, wire.StepResult) for result in results))
            stepped = {e.id: self._settle(e, result) for (e, _), result in zip(steps, results, strict=True)}
            return [without_step[item.episode] or stepped[item.episode] for item in items]

    def _result_without_step(self, item: wire.StepItem) -> wire.StepResult | None:
        """Return the result of a step that was taken or cannot be taken; None for a step to take."""
        episode = self.active.get(item.episode)
        if episode is None:
            ended = self._ended.get(item.episode)
            if ended is None:
                detail = "no such episode here: the server was restarted, or it was idle for too long; reset a new one"
                return wire.StepResult(episode=item.episode, status=wire.StepStatus.LOST, detail=detail)
            if item.step == ended.steps - 1 or ended.status is wire.StepStatus.LOST:
                return ended
            detail = f"the episode has ended after {ended.steps} steps"
            return wire.StepResult(
                episode=item.episode, status=wire.StepStatus.REFUSED, steps=ended.steps, detail=detail
            )
        if episode.last is not None and item.step == episode.steps - 1:
            return episode.last
        if item.step != episode.steps:
            detail = f"step {item.step} does not fit: the episode stands at step {episode.steps}"
            return episode.result(wire.StepStatus.REFUSED, detail=detail)
        return None

    def _result_of(self, episode: HeldEpisode, outcome: Transition | Exception) -> wire.StepResult | Exception:
        """Return the result of a step, or its error. An invalid outcome counts as an error.

        The episode stays as it is, so that a step without a result is not counted as taken.
        """
        if isinstance(outcome, Exception):
            return outcome
        try:
            return _written(_result_after(episode, outcome))
        except EnvironmentBrokenError as error:
            return error
        # Environments are other people's code and may give anything.
        except Exception as error:  # noqa: BLE001
            reason = " ".join(str(error).split())[:300]
            return EnvironmentBrokenError(f"the environment returned an invalid step result: {reason}")

    def _settle(self, episode: HeldEpisode, outcome: wire.StepResult | Exception) -> wire.StepResult:
        """Record a step's result or error in its episode."""
        episode.used = time.monotonic()
        if isinstance(outcome, ActionRefusedError):
            return episode.result(wire.StepStatus.REFUSED, detail=why_failed(outcome))
        if isinstance(outcome, Exception):
            reason, has_failed = why_failed(outcome), not isinstance(outcome, DependencyLostError)
            log.warning("episode lost", steps=episode.steps, error=reason)
            result = episode.result(wire.StepStatus.LOST, detail=reason, environment_failed=has_failed)
            # A hung environment is still in use by its thread.
            self._end(episode, result, release=not isinstance(outcome, EnvironmentHungError))
            return result
        episode.steps, episode.episode_return, episode.last = outcome.steps, outcome.episode_return, outcome
        if outcome.status is not wire.StepStatus.RUNNING:
            self._end(episode, outcome)
        return outcome

    def _end(self, episode: HeldEpisode, result: wire.StepResult, *, release: bool = True) -> None:
        """Drop an episode, but keep ``result`` for clients that ask for the last step again."""
        self._ended[episode.id] = result
        if len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)
        self._drop(episode, result.status.value, release=release)

    def _drop(self, episode: HeldEpisode, how: str, *, release: bool = True) -> None:
        del self.active[episode.id]
        self._count(how)
        if release:
            self.release(episode.environment)

    def release(self, environment: Environment) -> None:
        """Close an environment; nothing waits for that, because it may take long."""
        if type(environment).close is not Conversation.close:  # That one holds nothing.
            self._runner.release(environment.close)

    async def end(self) -> None:
        """Drop all episodes except those that are being stepped, and stop the runner."""
        self.drop_idle(0.0)
        await self._runner.stop()

    async def close(self, episode_ids: Sequence[str]) -> int:
        """End episodes early and return their number. An episode that is being stepped ends after the step."""
        episodes = [self.active[i] for i in dict.fromkeys(episode_ids) if i in self.active]
        for episode in episodes:
            async with episode.lock:
                if episode.id in self.active:
                    self._drop(episode, "closed")
        return len(episodes)

    def drop_idle(self, seconds: float) -> int:
        """Drop the episodes that were not stepped for ``seconds`` and return their number."""
        oldest = time.monotonic() - seconds
        idle = [e for e in self.active.values() if e.used < oldest and not e.lock.locked()]
        for episode in idle:
            self._drop(episode, "lost")
        return len(idle)

    def touch(self, episode_ids: Sequence[str]) -> None:
        """Mark episodes as in use, although they are not being stepped."""
        for episode_id in episode_ids:
            if episode_id in self.active:
                self.active[episode_id].used = time.monotonic()

    def _count(self, what: str, count: int = 1) -> None:
        self.counts[what] += count
        _COUNTERS[what].inc(count)
        ACTIVE.set(len(self.active))


def _start_of(info: wire.EnvironmentInfo, seed: int, state: wire.State | Exception) -> wire.EpisodeStart | Exception:
    """Return the start of an episode, or the error of its reset. An invalid state counts as an error."""
    if isinstance(state, Exception):
        return state
    seat = 0 if info.seats > 1 else None
    try:
        return _written(wire.EpisodeStart(episode=secrets.token_hex(8), seed=seed, state=state, seat=seat))
    except ValueError:
        return EnvironmentBrokenError(f"the environment gave {state!r:.60} as its first state")


def _result_after(episode: HeldEpisode, outcome: Transition) -> wire.StepResult:
    """Return the result of the next action of an episode.

    Raises:
        EnvironmentBrokenError: a reward is not finite, the rewards and the seat do not fit the environment's seats, or
            the value of the state is not a number or a list.
        ValueError: another value does not fit.
    """
    info, rewards, steps = episode.info, outcome.rewards, episode.steps + 1
    if not math.isfinite(outcome.reward):
        raise EnvironmentBrokenError(f"the environment gave the reward {outcome.reward}")
    if not isinstance(outcome.state, float | int | list):
        raise EnvironmentBrokenError(f"the environment gave {type(outcome.state).__name__} as state")
    seat_members: dict[str, Any] = {}
    if info.seats > 1:
        if len(rewards) != info.seats or rewards[0] != outcome.reward or not 0 <= outcome.seat < info.seats:
            raise EnvironmentBrokenError(
                f"the environment has {info.seats} seats and gave the rewards {rewards}, the reward {outcome.reward} "
                f"of seat 0, and the turn to seat {outcome.seat}"
            )
        seat_members = {"seat": outcome.seat, "rewards": list(rewards)}
    if outcome.terminated:
        status = wire.StepStatus.TERMINATED
    else:
        status = wire.StepStatus.TRUNCATED if outcome.truncated or steps >= info.max_steps else wire.StepStatus.RUNNING
    # Validation costs a fifth of model_construct, which fills in defaults in Python.
    return wire.StepResult(
        episode=episode.id,
        status=status,
        state=outcome.state,
        reward=outcome.reward,
        steps=steps,
        episode_return=episode.episode_return + outcome.reward,
        figures=dict(outcome.figures),
        **seat_members,
    )


Written = TypeVar("Written", bound=BaseModel)


def _written(model: Written) -> Written:
    """Return ``model``; raise ValueError if it cannot be written as JSON in UTF-8."""
    model.__pydantic_serializer__.to_json(model)
    return model
