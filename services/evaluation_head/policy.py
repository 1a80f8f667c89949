"""The interface of a policy: actions for states, each with the version that chose it; and the errors of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from services.http.problems import ProblemError
from services.protocol.evaluation import Action, EnvironmentInfo, State

MAX_WAITING = 4096
"""States that may wait for one policy: as many as one request may have. More would only wait longer."""


class StatesRefusedError(ProblemError):
    """States that the policy does not take; the message says which, and what the policy takes."""

    def __init__(self, detail: str) -> None:
        super().__init__(422, detail)


class OverloadedError(ProblemError):
    """A policy for which too many states wait; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        detail = f"{waiting} states wait already, allowed are {MAX_WAITING}; ask again after Retry-After"
        super().__init__(429, detail, {"Retry-After": str(retry_after)})
        self.retry_after = retry_after


class PolicyFailedError(ProblemError):
    """A policy that gave no action: it raised, could not be reached, or its output is not an action."""

    def __init__(self, detail: str) -> None:
        super().__init__(500, detail)


class Decision(NamedTuple):
    """An action, and the version of the policy that chose it; None where no single version did.

    ``logprob`` is the action's log-probability in nats; None where the policy gives none.
    """

    action: Action
    version: int | None
    logprob: float | None = None


class Policy(AbstractAsyncContextManager["Policy"], ABC):
    """A policy under its name. An async context manager from load to end."""

    kind: str

    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble: str | None = None
        """The policy's current problem, for the dashboard."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """Return one decision a state, in order; ``logprobs`` asks for log-probabilities that cost extra.

        Raises:
            StatesRefusedError: a state does not fit.
            OverloadedError: too many states wait.
            PolicyFailedError: the policy gave no action.
        """

    async def act_on_array(self, states: NDArray[np.float32], *, logprobs: bool = False) -> list[Decision]:
        """Do the same as ``act`` for states [count, *shape]."""
        return await self.act(states.tolist(), logprobs=logprobs)

    @abstractmethod
    async def refresh(self) -> None:
        """Look for a new version and use it. A failure is reported in ``trouble`` and not raised."""

    @abstractmethod
    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """Return why the policy cannot act in an environment; None where it can."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the policy's entry in /stats."""
