"""An environment that never ends: ``ENVIRONMENT=tests.services.evaluation_head.endless:Endless-v0``."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Endless(gymnasium.Env):
    """An environment whose observation never changes."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


gymnasium.register("Endless-v0", entry_point=Endless)
