"""A Python function as a policy: a rule of one's own, a solver, or a baseline to compare with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from services.core.imports import load_function
from services.core.tasks import in_background
from services.evaluation_head.policy import Decision, Policy, PolicyFailedError
from services.protocol.evaluation import Action, EnvironmentInfo, State

_ACTIONS = TypeAdapter(list[Action])


class FunctionPolicy(Policy):
    """The function ``module:function``, which takes a list of states and returns their actions in order.

    It is called in a thread, for one request at a time.
    """

    kind = "function"

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name)
        self._target = target
        self._one_at_a_time = asyncio.Lock()
        self._states = 0

    async def __aenter__(self) -> FunctionPolicy:
        self._function: Callable[[list[State]], Sequence[Action]] = load_function(f"policy {self.name!r}", self._target)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hold nothing."""

    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """See Policy."""
        async with self._one_at_a_time:
            given = await in_background(lambda: self._call(list(states)))
        try:
            actions = _ACTIONS.validate_python(to_jsonable_python(given))
            json.dumps(actions, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:  # also of what JSON does not have, such as NaN, infinities and numbers of numpy
            raise PolicyFailedError(
                f"{self._target} gave {given!r:.100}; needed is a list with an int, finite float, str or list a state"
            ) from error
        if len(actions) != len(states):
            raise PolicyFailedError(f"{self._target} gave {len(actions)} actions for {len(states)} states")
        self._states += len(states)
        return [Decision(action, None) for action in actions]

    def _call(self, states: list[State]) -> Sequence[Action]:
        try:
            return self._function(states)
        # Anybody's function may raise anything, also a SystemExit, which must not end the head.
        except BaseException as error:
            raise PolicyFailedError(f"{self._target} raised {type(error).__name__}: {error}") from error

    async def refresh(self) -> None:
        """Do nothing, because a function has one version."""

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """Return None, because only a call shows which states a function takes."""
        return None

    def stats(self) -> dict[str, Any]:
        """See Policy."""
        return {"function": self._target, "states": self._states}
