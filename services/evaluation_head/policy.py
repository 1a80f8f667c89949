"""What a policy is to the head: something that answers states with actions, and says which version of it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.protocol.evaluation import Action, EnvironmentInfo, State


class StatesRefusedError(ValueError):
    """The states are not such as the policy takes; the message says which, and what it takes."""


class OverloadedError(Exception):
    """Too many states wait already; ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PolicyFailedError(Exception):
    """The policy gave no action: it raised, could not be reached, or gave what is no action."""


class Decision(NamedTuple):
    """An action, and the version of the policy that chose it."""

    action: Action
    version: int | None


class Policy(ABC):
    """A policy under its name. An async context manager from load to end."""

    kind: str

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def act(self, states: Sequence[State]) -> list[Decision]:
        """One decision a state, in order.

        Raises:
            StatesRefusedError: a state does not fit.
            OverloadedError: too many wait.
            PolicyFailedError: there is no action to be had.
        """

    @abstractmethod
    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """Why the policy cannot play an environment; None where it can."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """What it has done, for /stats."""

    @property
    def trouble(self) -> str | None:
        """What is wrong with the policy at the moment."""
        return None

    @abstractmethod
    async def __aenter__(self) -> Policy: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...
