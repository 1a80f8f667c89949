"""The interface of a policy, and its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from services.clients.play import Decision, Episode, NoActionError
from services.http.problems import ProblemError
from services.protocol.evaluation import EnvironmentInfo

MAX_WAITING = 4096
"""States that may wait for one policy: as many as one request may have. More would only wait longer."""


class StatesRefusedError(ProblemError, NoActionError):
    """States that the policy does not take; the message says which, and what the policy takes."""

    def __init__(self, detail: str) -> None:
        super().__init__(422, detail)


def check_finite(states: NDArray[np.float32], what: str) -> None:
    """Check states [count, *shape].

    Raises:
        StatesRefusedError: one of them, which the message names, has ``what``.
    """
    finite = np.isfinite(states).reshape(len(states), -1).all(axis=1)
    if not finite.all():
        raise StatesRefusedError(f"state {int(finite.argmin())} has {what}")


class OverloadedError(ProblemError):
    """A policy for which too many states wait; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        detail = f"{waiting} states wait already, allowed are {MAX_WAITING}; ask again after Retry-After"
        super().__init__(429, detail, {"Retry-After": str(retry_after)})
        self.retry_after = retry_after


def check_room(waiting: int, states: int, retry_after: int) -> None:
    """Check that further states may wait.

    Raises:
        OverloadedError: too many wait already.
    """
    if waiting and waiting + states > MAX_WAITING:
        raise OverloadedError(waiting, retry_after)


class PolicyFailedError(ProblemError):
    """A policy that gave no action: it raised, could not be reached, or its output is not an action."""

    def __init__(self, detail: str) -> None:
        super().__init__(500, detail)


class Policy(AbstractAsyncContextManager["Policy"], ABC):
    """A policy under its name. An async context manager from load to end."""

    kind: str
    takes_arrays = False
    """True if ``act`` also takes states as float32 [count, *shape]."""

    def __init__(self, name: str, **about: Any) -> None:
        """Make a policy; ``about`` is shown in its entry of /stats."""
        self.name = name
        self._about = about
        self.trouble: str | None = None
        """The policy's current problem, for the dashboard."""
        self.states = 0
        """States that got actions."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None:
        """Release the policy's resources."""

    @abstractmethod
    async def act(self, states: Sequence[Any], *, logprobs: bool = False) -> list[Decision]:
        """Return one decision a state, in order; ``logprobs`` asks for log-probabilities that cost extra.

        Raises:
            StatesRefusedError: a state does not fit.
            OverloadedError: too many states wait.
            PolicyFailedError: the policy gave no action.
        """

    async def ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Return a decision for each episode of a play, also for none; raises as ``act`` does."""
        return await self.act([episode.state for episode in episodes]) if episodes else []

    def report(self, episode: Episode) -> None:
        """Take note of an episode that has ended."""

    async def refresh(self) -> None:
        """Look for a new version and use it. A failure is reported in ``trouble`` and not raised."""

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """Return why the policy cannot act in an environment; None if it can, or if only a call can show it."""
        return None

    def stats(self) -> dict[str, Any]:
        """Return the policy's entry in /stats."""
        return {**self._about, "states": self.states}
