"""Serve an environment made with the package openenv: ``python made_by_openenv.py PORT`` in its environment."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Word(Action):
    word: str


class Hint(Observation):
    prompt: str = ""
    result: str = ""


class Words(Environment):
    """A word to repeat, drawn by the seed; a wrong one is told, ``break`` raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._word, self._steps = random.Random(seed).choice(["apple", "pear", "plum"]), 0
        return Hint(prompt=f"Say {self._word}.")

    def step(self, action: Word, timeout_s: float | None = None, **_: Any) -> Hint:
        self._steps += 1
        if action.word == "break":
            raise RuntimeError("a gear fell off")
        is_right = action.word == self._word
        return Hint(result="Right." if is_right else "No.", done=is_right, reward=float(is_right))

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_app(Words, Word, Hint, env_name="words", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
