"""Measures the asynchronous against the synchronous job group at equal numbers of groups, alternating, in one run.

    python -m benchmarks.asynchronous [--slowdowns 1 4] [--staleness 1 2 4] [--steps 6] [--rounds 2] [--json FILE]

Both have one rollout node, one trainer node and half of the machine's cores for each, so that what is measured is the
overlap, not other shares. ``--slowdowns`` makes the engine so many times as slow as it is, without computing more, as
an engine on another machine would be; the last one is also measured with every bound of ``--staleness``, others with
the middle one. Every group is computed in full, whatever its rewards, and the learning rate is next to nothing, so that
all steps are alike. The time is that from the end of the first step to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.job import QUESTIONS, run_job
from benchmarks.common.slow_rollouts import FACTOR, job_group_with_slow_rollouts
from local_runner.environment import cores


@dataclass
class Mode:
    """One of the two modes, and what was measured of it."""

    name: str
    job_group: str
    nodes: dict[str, int]
    slowdown: float = 1.0
    max_staleness: int | None = None
    group_seconds: list[float] = field(default_factory=list)
    """Seconds a group, by round."""
    generate_seconds: list[float] = field(default_factory=list)
    """Seconds a step for which training waits for groups, by round."""
    train_seconds: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    """Groups that were too stale, by round."""

    def add(self, steps: Sequence[dict[str, Any]]) -> None:
        """Adds a round."""
        later = steps[1:]
        groups = sum(step["groups"] for step in later)
        self.group_seconds.append((steps[-1]["time"] - steps[0]["time"]) / groups)
        waits = [sum(step.get(f"seconds_{name}", 0.0) for name in ("wait", "generate", "score")) for step in later]
        self.generate_seconds.append(statistics.fmean(waits))
        self.train_seconds.append(statistics.fmean(step["seconds_train"] for step in later))
        self.staleness.append(statistics.fmean(step["staleness_mean"] for step in later))
        self.dropped.append(sum(step.get("groups_dropped_stale", 0.0) for step in later))

    def run(self, settings: Mapping[str, object]) -> None:
        """A round."""
        own = {FACTOR: self.slowdown} | ({} if self.max_staleness is None else {"MAX_STALENESS": self.max_staleness})
        with tempfile.TemporaryDirectory() as directory:
            path = job_group_with_slow_rollouts(self.job_group, Path(directory))
            self.add(run_job(str(path), {**settings, **own}, self.nodes))


def modes_of(slowdowns: Sequence[float], staleness: Sequence[int]) -> list[Mode]:
    """Both modes at every slowdown, the synchronous one first."""
    nodes = {"rollout-server": 1, "ppo-trainer": 1}
    modes = []
    for slowdown in slowdowns:
        modes.append(Mode("synchronous", "jobgroup.yaml", nodes, slowdown))
        bounds = staleness if slowdown == slowdowns[-1] else [sorted(staleness)[len(staleness) // 2]]
        for bound in bounds:
            name = f"asynchronous, staleness at most {bound}"
            modes.append(Mode(name, "jobgroup-async.yaml", {**nodes, "collector": 1}, slowdown, bound))
    return modes


def show(modes: Sequence[Mode], title: str) -> Table:
    """Medians of the rounds, and the ratio to the synchronous mode at the same slowdown."""
    table = Table(title=title)
    for name in ("rollouts", "", "s a group", "speed-up", "waits s", "trains s", "staleness", "dropped"):
        table.add_column(name, justify="right" if name else "left")
    base = 0.0
    for mode in modes:
        seconds = statistics.median(mode.group_seconds)
        if mode.max_staleness is None:
            base = seconds
        table.add_row(
            f"{mode.slowdown:g} x slower" if mode.slowdown != 1 else "as they are",
            mode.name,
            spread(mode.group_seconds),
            f"{base / seconds:.2f}",
            f"{statistics.median(mode.generate_seconds):.1f}",
            f"{statistics.median(mode.train_seconds):.1f}",
            f"{statistics.median(mode.staleness):.1f}",
            f"{statistics.median(mode.dropped):.0f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--completion-tokens", type=int, default=12)
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1, 4], help="of rollouts")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4], help="bounds in policy versions")
    parser.add_argument("--steps", type=int, default=6, help="steps of a round, the first of which warms up")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each")
    parser.add_argument("--quick", action="store_true", help="one round of four steps, one slowdown and one bound")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    if given.quick:
        given.rounds, given.steps, given.slowdowns, given.staleness = 1, 4, [4.0], [2]
    settings = {
        **QUESTIONS,
        "MODEL_NAME": given.model,
        "BATCH_SIZE": given.prompts,
        "GROUP_SIZE": given.group_size,
        "MAX_NEW_TOKENS": given.completion_tokens,
        "MAX_STEPS": given.steps,
        "OMP_NUM_THREADS": max(1, cores() // 2),
        # Has groups without reward variance computed as well.
        "ENTROPY_COEF": "1e-12",
        "LEARNING_RATE": "1e-9",
    }
    modes = modes_of(given.slowdowns, given.staleness)
    for number in range(given.rounds):
        for mode in modes:
            mode.run(settings)
            what = f"{mode.slowdown:g} x slower, {mode.name}"
            print(f"round {number + 1}, {what}: {mode.group_seconds[-1]:.2f} s a group", file=sys.stderr, flush=True)
    title = f"{given.prompts} prompts of {given.group_size} completions of at most {given.completion_tokens} tokens"
    Console().print(show(modes, title))
    if given.json:
        result = {"settings": settings, "cores": cores(), "modes": [asdict(mode) for mode in modes]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
