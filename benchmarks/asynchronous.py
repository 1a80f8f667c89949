"""The asynchronous job group against the synchronous one."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness, slow_rollouts
from benchmarks.harness import MODEL, Args, Benchmark, Option, Side
from benchmarks.job import QUESTIONS, Steps, run_job, write_job_group
from services.core.machine import cores


def round_of(steps: Steps) -> dict[str, float]:
    """Return the measurements of a run, without its first step.

    The waits are the seconds of a step in which training waits for groups.
    """
    later = steps[1:]
    waits = [sum(step.get(f"seconds_{name}", 0.0) for name in ("wait", "generate", "score")) for step in later]
    return {
        "seconds a group": (steps[-1]["time"] - steps[0]["time"]) / sum(step["groups"] for step in later),
        "waits": statistics.fmean(waits),
        "trains": statistics.fmean(step["seconds_train"] for step in later),
        "staleness": statistics.fmean(step["staleness_mean"] for step in later),
        "dropped": sum(step.get("groups_dropped_stale", 0.0) for step in later),
    }


def run_round(slowdown: float, bound: int | None, settings: Mapping[str, Any], _round: int) -> dict[str, float]:
    """Run a job group whose rollouts are ``slowdown`` times slower: asynchronous if staleness has a ``bound``."""
    nodes = {"rollout-server": 1, "ppo-trainer": 1}
    job_group = "jobgroup.yaml"
    if bound is not None:
        job_group, settings, nodes["collector"] = "jobgroups/async.yaml", {**settings, "MAX_STALENESS": bound}, 1
    with tempfile.TemporaryDirectory() as directory:
        command = f"exec env {slow_rollouts.FACTOR}={slowdown} python -m {slow_rollouts.__name__}"
        path = write_job_group(Path(directory), job_group, {"rollout-server": command})
        return round_of(run_job(path, settings, nodes))


def cases_of(slowdowns: Sequence[float], staleness: Sequence[int]) -> list[tuple[float, int | None]]:
    """Return each slowdown with its bounds of staleness; None, the synchronous mode, comes first."""
    middle = [sorted(staleness)[len(staleness) // 2]]
    return [
        (slowdown, bound)
        for slowdown in slowdowns
        for bound in (None, *(staleness if slowdown == slowdowns[-1] else middle))
    ]


def measure(args: Args) -> list[Side]:
    """Measure the asynchronous against the synchronous job group at equal numbers of groups.

    Both modes have one rollout node, one trainer node and half of the machine's cores for each, so that the benchmark
    measures the overlap and not other shares of the machine. --slowdowns slows the engine down without more
    computation, as if it ran on another machine. The last slowdown is measured with every bound of --staleness, others
    with the middle one. Every group is computed in full, whatever its rewards, and the learning rate is next to
    nothing, so that all steps are alike. The time runs from the end of the first step to the end of the last.
    """
    settings = {
        **QUESTIONS,
        "MODEL_NAME": args.model,
        "BATCH_SIZE": 4,
        "GROUP_SIZE": 4,
        "MAX_NEW_TOKENS": 12,
        "MAX_STEPS": args.steps,
        "OMP_NUM_THREADS": max(1, cores() // 2),
        # With an entropy term, groups without reward variance are computed as well.
        "ENTROPY_COEF": "1e-12",
        "LEARNING_RATE": "1e-9",
    }
    sides = []
    for slowdown, bound in cases_of(args.slowdowns, args.staleness):
        mode = "synchronous" if bound is None else f"asynchronous, staleness at most {bound}"
        side = Side(f"{slowdown:g} x slower, {mode}", partial(run_round, slowdown, bound, settings))
        sides.append(side)
    return harness.in_turn(sides, args.rounds)


def tables(_args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return the medians of the rounds, and the speed-up over the synchronous mode at the same slowdown."""
    rollouts = {side.name: side.name.split(", ", 1)[0] for side in sides}
    modes = {side.name: side.name.split(", ", 1)[1] for side in sides}
    base = {rollouts[side.name]: side.median("seconds a group") for side in sides if modes[side.name] == "synchronous"}
    columns: harness.Columns = {
        "rollouts": lambda side: rollouts[side.name],
        "mode": lambda side: modes[side.name],
        "s a group": lambda side: side.spread("seconds a group"),
        "speed-up": lambda side: f"{base[rollouts[side.name]] / side.median('seconds a group'):.2f}",
        "waits s": lambda side: f"{side.median('waits'):.1f}",
        "trains s": lambda side: f"{side.median('trains'):.1f}",
        "staleness": lambda side: f"{side.median('staleness'):.1f}",
        "dropped": lambda side: f"{side.median('dropped'):.1f}",
    }
    return [harness.table("4 prompts of 4 completions of at most 12 tokens", sides, columns)]


ASYNC = Benchmark(
    measure=measure,
    tables=tables,
    rounds=2,
    quick={"steps": 4, "slowdowns": [4.0], "staleness": [2]},
    options={
        "model": MODEL,
        "slowdowns": Option([1.0, 4.0], "of rollouts"),
        "staleness": Option([1, 2, 4], "bounds in policy versions"),
        "steps": Option(6, "steps of a round, the first of which warms up"),
    },
)
