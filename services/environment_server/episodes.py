"""The episodes that a server holds: begun by /reset, moved on by /step, each step taken once however often asked."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import Counter, Gauge

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.environment_server.catalogue import Catalogue, MakeEnvironment
from services.environment_server.environments import (
    ActionRefusedError,
    BlockingEnvironment,
    Conversation,
    Environment,
    EnvironmentHungError,
    Failure,
    Runner,
    Transition,
)
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import EnvironmentInfo, EpisodeStart, State, StepItem, StepResult, StepStatus

log = get_logger(__name__)

BEGUN = Counter("environment_episodes_begun", "Episodes begun.")
ENDED = Counter("environment_episodes_ended", "Episodes ended, by how.", ["how"])
STEPS = Counter("environment_steps", "Actions taken.")
ACTIVE = Gauge("environment_episodes_active", "Episodes held now.")

MAX_STUCK = 8
"""With more threads than this that never came back, a server is of no use any more."""
KEPT_ENDED = 10_000
"""Ended episodes of which the last result is remembered, for those who ask again."""


class FullError(Exception):
    """There are as many episodes as the server holds."""


class StuckError(Exception):
    """Too many environments hang; the server wants to be restarted."""


@dataclass
class Episode:
    """One episode."""

    id: str
    environment_id: str
    environment: Environment
    seed: int
    used: float
    steps: int = 0
    episode_return: float = 0.0
    last: StepResult | None = None
    running: asyncio.Future[StepResult] | None = field(default=None, repr=False)


class EpisodeTable:
    """All episodes of a server."""

    def __init__(self, settings: EnvironmentSettings, catalogue: Catalogue) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._active: dict[str, Episode] = {}
        self._beginning = 0
        self._ended: OrderedDict[str, StepResult] = OrderedDict()
        self._begin: Runner[tuple[Environment, State]] = Runner(settings.environment_step_seconds)
        self._step: Runner[Transition] = Runner(settings.environment_step_seconds)
        self._closing: set[asyncio.Future[None]] = set()
        self.counts = {"begun": 0, "terminated": 0, "truncated": 0, "lost": 0, "closed": 0, "steps": 0}

    @property
    def active(self) -> int:
        """Episodes held now."""
        return len(self._active)

    @property
    def stuck(self) -> int:
        """Environments that hang."""
        return self._begin.stuck + self._step.stuck

    async def reset(
        self, environment_id: str | None, count: int, seed: int | None
    ) -> tuple[EnvironmentInfo, list[EpisodeStart]]:
        """Begins ``count`` episodes, the i-th with ``seed`` + i; without a seed, with one drawn anew.

        Raises:
            UnknownEnvironmentError: there is no such environment.
            FullError: there are too many episodes.
            StuckError: too many environments hang.
            EnvironmentBrokenError: the environment cannot be begun.
        """
        name = environment_id or self._settings.environment
        if self.stuck > MAX_STUCK:
            raise StuckError(f"{self.stuck} environments hang")
        free = self._settings.environment_max_episodes - len(self._active) - self._beginning
        if count > free:
            most = self._settings.environment_max_episodes
            raise FullError(f"{count} episodes asked for, {max(free, 0)} of {most} (ENVIRONMENT_MAX_EPISODES) free")
        self._beginning += count
        try:
            make = await self._catalogue.maker(name)
            first = secrets.randbelow(2**31) if seed is None else seed
            seeds = [(first + i) % 2**31 for i in range(count)]
            if self._catalogue.is_conversation(name):
                begun = await self._begin.run_waiting([partial(_begin_conversation, make, one) for one in seeds])
            else:
                begun = await self._begin.run_blocking([partial(_begin_blocking, make, one) for one in seeds])
        finally:
            self._beginning -= count
        started = [one for one in begun if not isinstance(one, Failure)]
        for one in begun:
            if isinstance(one, Failure):
                for environment, _ in started:
                    self._let_go(environment)
                raise one.error
        starts = [self._add(name, number, *begin) for number, begin in zip(seeds, started, strict=True)]
        environment = started[0][0]
        info = EnvironmentInfo(
            id=name,
            state=environment.state_spec,
            action=environment.action_spec,
            max_steps=self._settings.environment_max_steps,
        )
        return info, starts

    def _add(self, environment_id: str, seed: int, environment: Environment, state: State) -> EpisodeStart:
        episode = Episode(secrets.token_hex(8), environment_id, environment, seed, time.monotonic())
        self._active[episode.id] = episode
        self._count("begun")
        BEGUN.inc()
        ACTIVE.set(len(self._active))
        return EpisodeStart(episode=episode.id, seed=seed, state=state)

    async def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        """One result an item, in order; what happens to one episode does not reach the others."""
        blocking: list[tuple[Episode, Callable[[], Transition]]] = []
        waiting: list[tuple[Episode, Callable[[], Awaitable[Transition]]]] = []
        answers: list[StepResult | asyncio.Future[StepResult]] = []
        for item in items:
            answer = self._answer_without_stepping(item)
            if answer is None:
                episode = self._active[item.episode]
                answer = episode.running = asyncio.get_running_loop().create_future()
                environment = episode.environment
                if isinstance(environment, BlockingEnvironment):
                    blocking.append((episode, partial(environment.step, item.action)))
                else:
                    waiting.append((episode, partial(environment.step, item.action)))
            answers.append(answer)
        # On its own, so that a client that leaves does not leave episodes half stepped.
        await asyncio.shield(asyncio.ensure_future(self._take(blocking, waiting)))
        return [answer if isinstance(answer, StepResult) else await asyncio.shield(answer) for answer in answers]

    def _answer_without_stepping(self, item: StepItem) -> StepResult | asyncio.Future[StepResult] | None:
        """The result of a step that was taken already, is being taken, or cannot be taken; None for one to take."""
        episode = self._active.get(item.episode)
        if episode is None:
            ended = self._ended.get(item.episode)
            if ended is None:
                detail = "no such episode here: the server was restarted, or it was idle for too long; reset a new one"
                return StepResult(episode=item.episode, status=StepStatus.LOST, detail=detail)
            if item.step == ended.steps - 1 or ended.status is StepStatus.LOST:
                return ended
            return _refused(item.episode, f"the episode has ended after {ended.steps} steps", ended.steps)
        if episode.running is not None and item.step == episode.steps:
            return episode.running
        if episode.last is not None and item.step == episode.steps - 1:
            return episode.last
        if item.step != episode.steps:
            return _refused(
                episode.id, f"step {item.step} does not fit: the episode stands at step {episode.steps}", episode.steps
            )
        return None

    async def _take(
        self,
        blocking: Sequence[tuple[Episode, Callable[[], Transition]]],
        waiting: Sequence[tuple[Episode, Callable[[], Awaitable[Transition]]]],
    ) -> None:
        in_thread = self._step.run_blocking([job for _, job in blocking])
        beside = self._step.run_waiting([job for _, job in waiting])
        first, second = await asyncio.gather(in_thread, beside)
        episodes = [episode for episode, _ in blocking] + [episode for episode, _ in waiting]
        for episode, outcome in zip(episodes, first + second, strict=True):
            running, episode.running = episode.running, None
            assert running is not None
            running.set_result(self._settle(episode, outcome))

    def _settle(self, episode: Episode, outcome: Transition | Failure) -> StepResult:
        """Writes down what a step led to."""
        episode.used = time.monotonic()
        if isinstance(outcome, Failure):
            if isinstance(outcome.error, ActionRefusedError):
                return _refused(episode.id, str(outcome.error), episode.steps)
            error = outcome.error
            log.warning("episode lost", environment=episode.environment_id, steps=episode.steps, error=repr(error))
            result = self._result(episode, StepStatus.LOST, detail=str(error) or repr(error))
            self._end(episode, result, "lost", close=not isinstance(error, EnvironmentHungError))
            return result
        episode.steps += 1
        episode.episode_return += outcome.reward
        self._count("steps")
        STEPS.inc()
        if outcome.terminated:
            status = StepStatus.TERMINATED
        elif outcome.truncated or episode.steps >= self._settings.environment_max_steps:
            status = StepStatus.TRUNCATED
        else:
            status = StepStatus.RUNNING
        result = self._result(episode, status, state=outcome.state, reward=outcome.reward)
        episode.last = result
        if status is not StepStatus.RUNNING:
            self._end(episode, result, status.value)
        return result

    def _result(
        self,
        episode: Episode,
        status: StepStatus,
        *,
        state: State | None = None,
        reward: float = 0.0,
        detail: str | None = None,
    ) -> StepResult:
        return StepResult.model_construct(
            episode=episode.id,
            status=status,
            state=state,
            reward=reward,
            steps=episode.steps,
            episode_return=episode.episode_return,
            detail=detail,
        )

    def _end(self, episode: Episode, result: StepResult | None, how: str, *, close: bool = True) -> None:
        """Lets go of an episode; ``result`` is what those are told who ask for its last step again."""
        self._active.pop(episode.id, None)
        if result is not None:
            self._ended[episode.id] = result
            if len(self._ended) > KEPT_ENDED:
                self._ended.popitem(last=False)
        self._count(how)
        ENDED.labels(how).inc()
        ACTIVE.set(len(self._active))
        # A hung environment is still in use by its thread.
        if close:
            self._let_go(episode.environment)

    def _let_go(self, environment: Environment) -> None:
        if isinstance(environment, BlockingEnvironment):
            closing = asyncio.ensure_future(in_background(environment.close))
            self._closing.add(closing)
            closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log.warning("an environment did not close well", error=repr(error))

    def close(self, episode_ids: Sequence[str]) -> int:
        """Ends episodes before their end; returns how many there were. One that is being stepped ends after that."""
        found = [self._active[i] for i in dict.fromkeys(episode_ids) if i in self._active]
        for episode in found:
            if episode.running is not None:
                episode.running.add_done_callback(partial(self._close, episode))
            else:
                self._close(episode)
        return len(found)

    def _close(self, episode: Episode, _stepped: asyncio.Future[StepResult] | None = None) -> None:
        if episode.id in self._active:
            self._end(episode, None, "closed")

    def drop_idle(self) -> int:
        """Drops the episodes that nobody stepped for too long; returns how many."""
        oldest = time.monotonic() - self._settings.environment_idle_seconds
        idle = [e for e in self._active.values() if e.used < oldest and e.running is None]
        for episode in idle:
            self._end(episode, None, "lost")
        return len(idle)

    def touch(self, episode_ids: Sequence[str]) -> None:
        """Says that episodes are in use though nobody steps them."""
        for episode_id in episode_ids:
            if episode_id in self._active:
                self._active[episode_id].used = time.monotonic()

    def close_all(self) -> None:
        """Ends every episode."""
        self.close(list(self._active))

    def by_environment(self) -> dict[str, int]:
        """How many episodes of each environment are held."""
        found: dict[str, int] = {}
        for episode in self._active.values():
            found[episode.environment_id] = found.get(episode.environment_id, 0) + 1
        return found

    def _count(self, what: str) -> None:
        self.counts[what] += 1


def _refused(episode_id: str, detail: str, steps: int) -> StepResult:
    return StepResult(episode=episode_id, status=StepStatus.REFUSED, detail=detail, steps=steps)


def _begin_blocking(make: MakeEnvironment, seed: int) -> tuple[Environment, State]:
    environment = make()
    assert isinstance(environment, BlockingEnvironment)
    return environment, environment.reset(seed)


async def _begin_conversation(make: MakeEnvironment, seed: int) -> tuple[Environment, State]:
    environment = make()
    assert isinstance(environment, Conversation)
    return environment, await environment.reset(seed)
