"""An environment that kills or hangs its process: ``tests.evaluation.deadly_environment:Deadly-v0``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

MARKS = "DEADLY_MARKS"
"""Variable with a directory, in which a file tells that a seed has killed or hung its process once."""
KILLS_ONCE, KILLS_ALWAYS, HANGS_ONCE = 1, 2, 3


class Deadly(gymnasium.Env[Any, Any]):
    """An episode of four steps whose rewards depend on seed and actions, unless the seed is one of the above."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.steps = seed, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 2 and os.environ.get(MARKS):
            self._die()
        return self._observed(), float(self.np_random.normal() + action), self.steps == 4, False, {}

    def _observed(self) -> Any:
        return self.np_random.normal(size=4)

    def _die(self) -> None:
        mark = Path(os.environ[MARKS]) / str(self.seed)
        if self.seed == KILLS_ALWAYS or (self.seed == KILLS_ONCE and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.seed == HANGS_ONCE and not mark.exists():
            mark.touch()
            time.sleep(600)


gymnasium.register("Deadly-v0", entry_point=Deadly)
