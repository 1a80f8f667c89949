"""Conversations, the environments of text; and what an environment returns and raises."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from services.core.errors import ConfigurationError, DependencyLostError, own_error
from services.http.problems import ProblemError
from services.protocol import evaluation as wire


class ActionRefusedError(ValueError):
    """An action that the environment does not take; the episode stays as it was. The message says which it takes."""


class EnvironmentBrokenError(Exception):
    """A failure of the environment, after which its episode cannot continue."""


class EnvironmentHungError(EnvironmentBrokenError):
    """A reset or step that takes too long and is still running in its thread."""


def why_failed(error: BaseException) -> str:
    """Return why an environment failed; for an error of the user's code, with its type and its place."""
    is_ours = isinstance(error, ActionRefusedError | EnvironmentBrokenError | ConfigurationError | DependencyLostError)
    text = str(error) if is_ours else own_error(error)
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Transition:
    """The state and reward after an action, and whether the episode terminates or is truncated, as gymnasium has it.

    ``figures`` has named numbers about the action, which are reported as means over actions. In a game of several
    seats, ``seat`` acts next (at the end of the episode: acted last), ``state`` is that seat's view, and ``rewards``
    has one reward a seat; ``reward`` is seat 0's.
    """

    state: wire.State
    reward: float
    terminated: bool = False
    truncated: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    seat: int = 0
    rewards: tuple[float, ...] = ()


class Conversation(ABC):
    """An environment of text for one episode: a state is the list of messages so far, an action the policy's answer.

    A game of several ``seats`` keeps a conversation with each of them. Seat 0 acts first.

    A class that declares ``deterministic`` has the same states and rewards after the same seed and actions, in any
    process. Its episodes continue on another server when theirs is lost. ``version`` must change when the states or
    rewards change, because a run refuses servers of another version.
    """

    state_spec: ClassVar = wire.StateSpec(kind=wire.StateKind.MESSAGES)
    action_spec: ClassVar = wire.ActionSpec(kind=wire.ActionKind.TEXT)
    seats: ClassVar[int] = 1
    deterministic: ClassVar[bool] = False
    version: str = ""

    @abstractmethod
    async def reset(self, seed: int) -> wire.State:
        """Begin the episode and return its first messages. The same seed begins the same episode."""

    @abstractmethod
    async def step(self, action: wire.Action) -> Transition:
        """Take the policy's answer and return the messages after it.

        Raises:
            ActionRefusedError: the action does not fit.
            DependencyLostError: a service that the environment needs is away, and the episode is lost.
            Exception: with any other error the episode is lost, too. A run ends if this happens to all its episodes.
        """

    def close(self) -> None:  # noqa: B027  # most conversations hold nothing
        """Release the conversation's resources, such as files; called in another thread, unless it is a coroutine."""


class Tasks(ABC):
    """Environments of numbered tasks: ``splits`` has the number of tasks by name.

    ``deterministic`` and ``version`` are those of Conversation, for all tasks together. Called with a seed, it makes an
    environment of the task that the seed draws from the first split that has tasks.
    """

    splits: Mapping[str, int]
    deterministic: bool = False
    version: str = ""

    def __call__(self, seed: int) -> Conversation:
        """Return the environment for the episode of a seed."""
        return self.maker()(seed)

    def maker(self, split: str | None = None, index: int | None = None) -> Callable[[int], Conversation]:
        """Return a function from seeds to environments: of one task, or of the tasks that the seeds draw from a split.

        Raises:
            ProblemError: the split or the task does not exist.
        """
        name = next((name for name, size in self.splits.items() if size), "") if split is None else split
        if name not in self.splits:
            raise ProblemError(400, f"split is {name[:60]!r}; there are {', '.join(self.splits)}")
        size = self.splits[name]
        if index is None:
            return lambda seed: self.make(name, random.Random(seed).randrange(size))
        if index >= size:
            raise ProblemError(400, f"index is {index}; {name} has {size} tasks")
        return lambda _seed: self.make(name, index)

    @abstractmethod
    def make(self, split: str, index: int) -> Conversation:
        """Return the environment for an episode of one task; ``index`` is below ``splits[split]``."""


def text_of(action: wire.Action) -> str:
    """Return an action that is text.

    Raises:
        ActionRefusedError: the action is not text.
    """
    if not isinstance(action, str):
        raise ActionRefusedError(f"the action is {str(action)[:60]!r}; allowed is text")
    return action
