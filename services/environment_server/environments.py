"""What an environment is here: gymnasium's, which block while they compute, or conversations, which may wait."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from services.core.tasks import in_background
from services.protocol.evaluation import Action, ActionKind, ActionSpec, State, StateKind, StateSpec

T = TypeVar("T")


class ActionRefusedError(ValueError):
    """The action does not fit; the episode is as it was before. The message says what fits."""


class EnvironmentBrokenError(Exception):
    """The environment raised, or gave what is no state or reward; its episode cannot go on."""


class EnvironmentHungError(EnvironmentBrokenError):
    """The environment took too long and is still at it."""


@dataclass(frozen=True)
class Transition:
    """What an action led to."""

    state: State
    reward: float
    terminated: bool = False
    truncated: bool = False


class BlockingEnvironment(ABC):
    """One episode's environment that computes in the calling thread; its calls come one after another."""

    state_spec: StateSpec
    action_spec: ActionSpec

    @abstractmethod
    def reset(self, seed: int) -> State:
        """Begins the episode; the same seed begins the same one. EnvironmentBrokenError where that fails."""

    @abstractmethod
    def step(self, action: Action) -> Transition:
        """Takes an action.

        Raises:
            ActionRefusedError: it does not fit.
            EnvironmentBrokenError: the environment failed.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """Lets go of what the environment holds."""


class Conversation(ABC):
    """One episode's environment of text: states are the messages so far, actions what the policy says."""

    state_spec: ClassVar = StateSpec(kind=StateKind.MESSAGES)
    action_spec: ClassVar = ActionSpec(kind=ActionKind.TEXT)

    @abstractmethod
    async def reset(self, seed: int) -> State:
        """As BlockingEnvironment's."""

    @abstractmethod
    async def step(self, action: Action) -> Transition:
        """As BlockingEnvironment's."""

    def close(self) -> None:  # noqa: B027
        """Lets go of what the environment holds."""


Environment = BlockingEnvironment | Conversation


@dataclass(frozen=True)
class Failure:
    """What a job ended with instead of a result."""

    error: Exception


class Runner(Generic[T]):
    """Runs jobs beside the event loop: the blocking ones of a call in one thread, one after another.

    A job that takes longer than ``seconds`` is given up: its thread is left alone, since nothing can end a thread, and
    another one goes on with the jobs behind it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.stuck = 0
        """Threads that were given up and have not come back since."""

    async def run_blocking(self, jobs: Sequence[Callable[[], T]]) -> list[T | Failure]:
        """The results of ``jobs`` in order; whatever one raises stands in its place."""
        results: list[T | Failure] = []
        while len(results) < len(jobs):
            results += await self._run_until_stuck(jobs[len(results) :])
        return results

    async def run_waiting(self, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T | Failure]:
        """The same for jobs that may be awaited, all at once."""
        return list(await asyncio.gather(*(self._await(job) for job in jobs)))

    async def _await(self, job: Callable[[], Awaitable[T]]) -> T | Failure:
        try:
            async with asyncio.timeout(self._seconds):
                return await job()
        except TimeoutError:
            return Failure(self._too_long())
        # Told to the client as its episode's end.
        except Exception as error:  # noqa: BLE001
            return Failure(error)

    async def _run_until_stuck(self, jobs: Sequence[Callable[[], T]]) -> list[T | Failure]:
        results: list[T | Failure] = []
        given_up = False

        def work() -> None:
            for job in jobs:
                if given_up:
                    return
                try:
                    result: T | Failure = job()
                # As above.
                except Exception as error:  # noqa: BLE001
                    result = Failure(error)
                if not given_up:
                    results.append(result)

        thread = asyncio.ensure_future(in_background(work))
        while not thread.done():
            before = len(results)
            await asyncio.wait({thread}, timeout=self._seconds)
            if not thread.done() and len(results) == before:
                given_up = True
                self.stuck += 1
                thread.add_done_callback(self._came_back)
                return [*results[:before], Failure(self._too_long())]
        thread.result()
        return results

    def _came_back(self, _thread: asyncio.Future[None]) -> None:
        self.stuck -= 1

    def _too_long(self) -> EnvironmentHungError:
        return EnvironmentHungError(f"the environment took more than {self._seconds:g} s (ENVIRONMENT_STEP_SECONDS)")
