"""Environments of gymnasium: observations as numbers, actions as an index or numbers; or texts, as a conversation."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Text
from gymnasium.wrappers import FlattenObservation

from services.core.errors import ConfigurationError
from services.environment_server.environments import (
    ActionRefusedError,
    Conversation,
    EnvironmentBrokenError,
    Transition,
)
from services.protocol.evaluation import Action, ActionKind, ActionSpec, State, StateKind, StateSpec


class GymnasiumEnvironment:
    """One episode's environment of gymnasium. Its calls block while they compute.

    A Box of observations keeps its shape; observations of any other space are flattened to a vector. Where observations
    and actions are Text, the states are the messages so far. ``deterministic`` and ``version`` are attributes of the
    environment's class, as in Conversation.
    """

    def __init__(self, environment_id: str) -> None:
        """Make the environment.

        Raises:
            ConfigurationError: there is no such environment, its states are not a fixed number of numbers, or its
                actions are neither an index nor numbers.
            ImportError: the module before the colon cannot be imported.
            Exception: whatever the environment raises.
        """
        try:
            self._environment: gymnasium.Env[Any, Any] = gymnasium.make(environment_id, disable_env_checker=True)
        except gymnasium.error.Error as error:
            raise ConfigurationError(str(error).rstrip(".")) from error
        spaces = self._environment.observation_space, self._environment.action_space
        self._messages: list[dict[str, str]] | None = [] if all(isinstance(space, Text) for space in spaces) else None
        if not isinstance(spaces[0], Box) and self._messages is None:
            self._environment = FlattenObservation(self._environment)
        # Kept, because a wrapped environment asks every wrapper for its space.
        observations, actions = self._environment.observation_space, self._environment.action_space
        self._actions = actions
        self.deterministic = bool(getattr(self._environment.unwrapped, "deterministic", False))
        self.version = str(getattr(self._environment.unwrapped, "version", ""))
        if self._messages is not None:
            self.state_spec, self.action_spec = Conversation.state_spec, Conversation.action_spec
            return
        if not isinstance(observations, Box):
            raise ConfigurationError(f"its observations, {observations}, have no fixed number of numbers")
        self.state_spec = StateSpec(kind=StateKind.NUMBERS, shape=list(observations.shape))
        if isinstance(actions, Discrete):
            self._count, self._start = int(actions.n), int(actions.start)
            self.action_spec = ActionSpec(kind=ActionKind.INDEX, count=self._count, start=self._start)
        elif isinstance(actions, Box):
            self.action_spec = ActionSpec(kind=ActionKind.NUMBERS, shape=list(actions.shape))
        else:
            raise ConfigurationError(
                f"its actions, {actions}, are neither an index nor numbers; an environment of text has spaces Text "
                "for observations and for actions, or is a Conversation"
            )

    def reset(self, seed: int) -> State:
        """Begin the episode and return its first state. The same seed begins the same episode."""
        observation, _ = self._environment.reset(seed=seed)
        return self._state_of(observation)

    def step(self, action: Action) -> Transition:
        """Take an action. Numbers beyond a Box's bounds are clipped to them.

        Raises:
            ActionRefusedError: it does not fit.
            EnvironmentBrokenError: the observation or the reward is not finite.
            Exception: whatever the environment raises.
        """
        observation, reward, terminated, truncated, _ = self._environment.step(self._decoded(action))
        value = float(reward)
        if not math.isfinite(value):
            raise EnvironmentBrokenError(f"the environment gave the reward {value}")
        if self._messages is not None:
            self._messages.append({"role": "assistant", "content": str(action)})
        return Transition(self._state_of(observation), value, bool(terminated), bool(truncated))

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _state_of(self, observation: Any) -> State:
        """Return an observation as JSON has it; a text as the last message."""
        if self._messages is None:
            return _encoded(observation)
        self._messages.append({"role": "user", "content": str(observation)})
        return list(self._messages)

    def _decoded(self, action: Action) -> Any:
        """Return an action as the environment takes it."""
        space = self._actions
        if isinstance(space, Discrete):
            if type(action) is not int or not 0 <= action - self._start < self._count:
                raise _refusal(action, space)
            return np.int64(action)
        if isinstance(space, Text):
            if action not in space:
                raise _refusal(action, space)
            return action
        try:
            array = np.asarray(action)
        except ValueError as error:  # lists of different lengths
            raise _refusal(action, space) from error
        if array.dtype.kind not in "iuf" or array.shape != space.shape or not np.isfinite(array).all():
            raise _refusal(action, space)
        return np.clip(array, space.low, space.high).astype(space.dtype)


def _refusal(action: Action, space: gymnasium.Space[Any]) -> ActionRefusedError:
    return ActionRefusedError(f"the action is {repr(action)[:60]}; the environment takes {space}")


def _encoded(observation: Any) -> State:
    """Return an observation as JSON has it, nested lists of numbers."""
    array = np.asarray(observation)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise EnvironmentBrokenError("the environment gave an observation that is not finite")
    encoded: State = array.tolist()
    return encoded
