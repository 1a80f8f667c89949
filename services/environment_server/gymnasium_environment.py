"""Environments of gymnasium."""

from __future__ import annotations

import math

import gymnasium

from services.environment_server import spaces
from services.environment_server.environments import EnvironmentBrokenError, Transition
from services.protocol.evaluation import Action, State


class GymnasiumEnvironment:
    """One episode's environment of gymnasium. Its calls block while they compute."""

    def __init__(self, environment_id: str) -> None:
        """Make the environment.

        Raises:
            gymnasium.error.Error: there is no such environment, or it lacks a package.
            ImportError: the module before the colon cannot be imported.
            spaces.UnsupportedSpaceError: its states or actions have no form on the wire.
        """
        self._environment = gymnasium.make(environment_id, disable_env_checker=True)
        self.state_spec = spaces.state_spec(self._environment.observation_space)
        self.action_spec = spaces.action_spec(self._environment.action_space)

    def reset(self, seed: int) -> State:
        """Begin the episode and return its first state. The same seed begins the same episode."""
        observation, _ = self._environment.reset(seed=seed)
        return spaces.encode_state(self._environment.observation_space, observation)

    def step(self, action: Action) -> Transition:
        """Take an action.

        Raises:
            ActionRefusedError: it does not fit.
            EnvironmentBrokenError: the observation or the reward is not finite.
            Exception: whatever the environment raises.
        """
        decoded = spaces.decode_action(self._environment.action_space, action)
        observation, reward, terminated, truncated, _ = self._environment.step(decoded)
        value = float(reward)
        if not math.isfinite(value):
            raise EnvironmentBrokenError(f"the environment gave the reward {value}")
        state = spaces.encode_state(self._environment.observation_space, observation)
        return Transition(state, value, bool(terminated), bool(truncated))

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()
