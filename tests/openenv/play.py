"""Play on an environment server with OpenEnv's own clients and verifiers' taskset, and print what they got as JSON.

Usage: python play.py URL_OF_CARTPOLE URL_OF_GUESSING URL_OF_GSM8K, in an environment that has openenv and verifiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

from openenv import GenericEnvClient


def play_cartpole(url: str) -> dict[str, Any]:
    with GenericEnvClient(base_url=url).sync() as env:
        result = env.reset(seed=7)
        first, rewards = result.observation, []
        while not result.done:
            result = env.step({"action": 1})
            rewards.append(result.reward)
        state = env.state()
        try:
            env.step({"action": 5})
        except RuntimeError as error:
            refusal = str(error)
    return {"first": first, "rewards": rewards, "steps": state["step_count"], "refusal": refusal}


class Bisection:
    """A player of verifiers' environment that guesses a number by bisection."""

    def __init__(self) -> None:
        self.low, self.high, self.rewards = 1, 100, {}
        self.last_reply, self.terminated = "", False
        self.player = self.trace = self

    @contextlib.asynccontextmanager
    async def interaction(self, _task: Any) -> AsyncIterator[Bisection]:
        yield self

    async def turn(self, prompt: str) -> Bisection:
        said = json.loads(prompt)["observation"]["messages"][-1]["content"]
        guess = (self.low + self.high) // 2
        if said in ("Higher.", "Lower."):
            self.low, self.high = (guess + 1, self.high) if said == "Higher." else (self.low, guess - 1)
        self.last_reply = str((self.low + self.high) // 2)
        return self

    def record_reward(self, name: str, value: float) -> None:
        self.rewards[name] = value


async def play_by_verifiers(url: str) -> dict[str, Any]:
    # verifiers pins mcp 2 for this taskset of another protocol, and fastmcp, which openenv needs, pins mcp below 2.
    other = types.ModuleType("verifiers.v1.tasksets.nemo_gym")
    other.NeMoGymConfig = other.NeMoGymTaskset = object  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other
    from verifiers.v1.tasksets.openenv import OpenEnvConfig, OpenEnvEnv, OpenEnvTaskset

    config = OpenEnvConfig(base_url=url, resets=[{"seed": seed} for seed in range(3)])
    rewards = []
    for task in OpenEnvTaskset(config).load():
        player = Bisection()
        await OpenEnvEnv.run(None, task, player)
        rewards.append(player.rewards["openenv_reward"])
    return {"rewards": rewards}


def main(cartpole: str, guessing: str) -> None:
    told = {
        "cartpole": play_cartpole(cartpole),
        "verifiers": asyncio.run(play_by_verifiers(guessing)),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
