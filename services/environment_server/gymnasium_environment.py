"""Environments of gymnasium."""

from __future__ import annotations

import math
from typing import Any

import gymnasium

from services.environment_server import spaces
from services.environment_server.environments import BlockingEnvironment, EnvironmentBrokenError, Transition
from services.protocol.evaluation import Action, State


class GymnasiumEnvironment(BlockingEnvironment):
    """A gymnasium environment."""

    def __init__(self, environment: gymnasium.Env[Any, Any]) -> None:
        self._environment = environment
        self.state_spec = spaces.state_spec(environment.observation_space)
        self.action_spec = spaces.action_spec(environment.action_space)

    @classmethod
    def make(cls, environment_id: str) -> GymnasiumEnvironment:
        """Makes one by its id.

        Raises:
            gymnasium.error.Error: there is no such environment, or it lacks a package.
            ImportError: the module before the colon cannot be imported.
            spaces.UnsupportedSpaceError: its states or actions have no form on the wire.
        """
        return cls(gymnasium.make(environment_id, disable_env_checker=True))

    def reset(self, seed: int) -> State:
        """Begins the episode."""
        try:
            observation, _ = self._environment.reset(seed=seed)
        # Environments are other people's code and may raise anything; whatever it is, this episode cannot begin.
        except Exception as error:
            raise EnvironmentBrokenError(f"reset failed: {type(error).__name__}: {error}") from error
        return spaces.encode_state(self._environment.observation_space, observation)

    def step(self, action: Action) -> Transition:
        """Takes an action."""
        decoded = spaces.decode_action(self._environment.action_space, action)
        try:
            observation, reward, terminated, truncated, _ = self._environment.step(decoded)
            value = float(reward)
        # As above.
        except Exception as error:
            raise EnvironmentBrokenError(f"step failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise EnvironmentBrokenError(f"the environment gave the reward {value}")
        state = spaces.encode_state(self._environment.observation_space, observation)
        return Transition(state, value, bool(terminated), bool(truncated))

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()
