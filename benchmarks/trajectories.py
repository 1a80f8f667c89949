"""Time a million steps of CartPole-v1 as grpo trajectories writes them, against gymnasium alone.

    python -m benchmarks.trajectories [--rounds 3] [--quick] [--json FILE]

Every side plays the same number of steps in 256 environments of one process. "gymnasium alone" steps them and does
nothing else, which is the floor. "with the policy" also asks the policy of `toys.cartpole` for the actions
of all environments at once. "trajectories" is the whole command's work, from loading the policy to the last Parquet
file; each of its episodes has 500 steps.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.common import harness
from benchmarks.common.harness import spread
from evaluation.trajectories.run import Options, generate
from services.core import logs
from services.evaluation_head import checkpoint
from toys.cartpole import ACTION, STATE, CartPolePolicy

ENVIRONMENTS = 256
EPISODE_STEPS = 500
STEPS = 1_000_000
QUICK_STEPS = 50_000

Decide = Callable[[list[Any]], list[int]]


def push(states: list[Any]) -> list[int]:
    """Return actions that balance the pole, at the least cost."""
    return [int(state[2] + 0.3 * state[3] > 0) for state in states]


def step_alone(steps: int, decide: Decide) -> None:
    """Step environments of gymnasium so many times, with the actions of ``decide``."""
    environments = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(ENVIRONMENTS)]
    states = [environment.reset(seed=seed)[0] for seed, environment in enumerate(environments)]
    for _ in range(steps // ENVIRONMENTS):
        actions = decide(states)
        for place, environment in enumerate(environments):
            state, _, terminated, truncated, _ = environment.step(actions[place])
            states[place] = environment.reset()[0] if terminated or truncated else state


def step_with_policy(steps: int, policy: Path) -> None:
    """Do the same with a batched torch policy."""
    loaded = checkpoint.load(checkpoint.find(policy), torch.device("cpu"))
    step_alone(steps, lambda states: loaded.decide(np.asarray(states, np.float32))[0])


def write_trajectories(steps: int, policy: Path) -> None:
    """Write the same number of steps to Parquet files."""
    with tempfile.TemporaryDirectory() as directory:
        options = Options(
            environment="CartPole-v1",
            server=None,
            policies=f"cartpole={policy}",
            episodes=steps // EPISODE_STEPS,
            seed=0,
            shard_episodes=256,
            at_once=ENVIRONMENTS,
            save_to=Path(directory),
        )
        played = asyncio.run(generate(options, lambda _line: None))["steps"]
        if played != steps:
            raise SystemExit(f"error: {played} steps were written instead of {steps}")


@dataclass
class Side:
    """A way to play, and the measured seconds of each round."""

    name: str
    play: Callable[[int], None]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def measure(self, steps: int) -> str:
        """Play so many steps and return the seconds as text."""
        started, cpu = time.perf_counter(), time.process_time()
        self.play(steps)
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu)
        return f"{self.seconds[-1]:.1f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    given = harness.CommandLine("trajectories", rounds=3, quick=f"{QUICK_STEPS} steps, one round").parse(arguments)
    logs.configure("trajectories", "warning")
    steps = QUICK_STEPS if given.quick else STEPS
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "cartpole.pt2"
        checkpoint.save_policy(CartPolePolicy(64, 2, 0), policy, STATE, ACTION)
        sides = [
            Side("gymnasium alone", lambda count: step_alone(count, push)),
            Side("with the policy", lambda count: step_with_policy(count, policy)),
            Side("trajectories", lambda count: write_trajectories(count, policy)),
        ]
        harness.in_turn(sides, given.rounds, lambda side: side.measure(steps))
    rows = [
        (
            side.name,
            spread(side.seconds, 1),
            spread(side.cpu_seconds, 1),
            spread([steps / seconds for seconds in side.seconds], 0),
            spread([ours / alone for ours, alone in zip(side.cpu_seconds, sides[0].cpu_seconds, strict=True)]),
        )
        for side in sides
    ]
    columns = ("", "seconds", "processor seconds", "steps/s", "processor time to gymnasium's")
    title = f"{steps} steps of CartPole-v1, {ENVIRONMENTS} environments in one process"
    harness.finish(given, [harness.table(title, columns, rows)], [vars(side) for side in sides])


if __name__ == "__main__":
    main()
