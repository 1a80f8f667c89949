"""Measure the asynchronous against the synchronous job group at equal numbers of groups.

    python -m benchmarks.asynchronous [--slowdowns 1 4] [--staleness 1 2 4] [--steps 6] [--rounds 2] [--json FILE]

Both modes have one rollout node, one trainer node and half of the machine's cores for each, so that the benchmark
measures the overlap and not other shares of the machine. ``--slowdowns`` slows the engine down without more
computation, as if it ran on another machine. The last slowdown is measured with every bound of ``--staleness``, others
with the middle one. Every group is computed in full, whatever its rewards, and the learning rate is next to nothing, so
that all steps are alike. The time runs from the end of the first step to the end of the last.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from benchmarks.common import harness, slow_rollouts
from benchmarks.common.harness import spread
from benchmarks.common.job import QUESTIONS, Steps, run_job, write_job_group
from services.core.machine import cores


@dataclass(frozen=True)
class Round:
    """The measurements of a run, without its first step."""

    group_seconds: float
    """Seconds a group."""
    wait_seconds: float
    """Seconds of a step in which training waits for groups."""
    train_seconds: float
    staleness: float
    dropped: float
    """Groups that were too stale."""


def round_of(steps: Steps) -> Round:
    """Return the measurements of a run."""
    later = steps[1:]
    waits = [sum(step.get(f"seconds_{name}", 0.0) for name in ("wait", "generate", "score")) for step in later]
    return Round(
        group_seconds=(steps[-1]["time"] - steps[0]["time"]) / sum(step["groups"] for step in later),
        wait_seconds=statistics.fmean(waits),
        train_seconds=statistics.fmean(step["seconds_train"] for step in later),
        staleness=statistics.fmean(step["staleness_mean"] for step in later),
        dropped=sum(step.get("groups_dropped_stale", 0.0) for step in later),
    )


@dataclass
class Mode:
    """A mode at a slowdown of rollouts, and its rounds."""

    slowdown: float
    max_staleness: int | None = None
    """The asynchronous mode's bound in policy versions; None in synchronous mode."""
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The mode and its bound."""
        return "synchronous" if self.max_staleness is None else f"asynchronous, staleness at most {self.max_staleness}"

    def median(self, measurement: str) -> float:
        """Return the median of a measurement over the rounds."""
        return float(statistics.median(getattr(one, measurement) for one in self.rounds))

    def measure(self, settings: Mapping[str, object]) -> str:
        """Run a round; return what to print of it."""
        given, nodes = dict(settings), {"rollout-server": 1, "ppo-trainer": 1}
        job_group = "jobgroup.yaml"
        if self.max_staleness is not None:
            job_group, given["MAX_STALENESS"], nodes["collector"] = "jobgroups/async.yaml", self.max_staleness, 1
        with tempfile.TemporaryDirectory() as directory:
            command = f"exec env {slow_rollouts.FACTOR}={self.slowdown} python -m benchmarks.common.slow_rollouts"
            path = write_job_group(Path(directory), job_group, {"rollout-server": command})
            self.rounds.append(round_of(run_job(path, given, nodes)))
        return f"rollouts {self.slowdown:g} x slower: {self.rounds[-1].group_seconds:.2f} s a group"


def modes_of(slowdowns: Sequence[float], staleness: Sequence[int]) -> list[Mode]:
    """Return the modes at every slowdown, the synchronous one first."""
    modes = []
    for slowdown in slowdowns:
        bounds = staleness if slowdown == slowdowns[-1] else [sorted(staleness)[len(staleness) // 2]]
        modes += [Mode(slowdown), *(Mode(slowdown, bound) for bound in bounds)]
    return modes


def show(modes: Sequence[Mode]) -> Table:
    """Return the medians of the rounds, and the speed-up over the synchronous mode at the same slowdown, as a table."""
    base = {mode.slowdown: mode.median("group_seconds") for mode in modes if mode.max_staleness is None}
    rows = []
    for mode in modes:
        seconds = spread([one.group_seconds for one in mode.rounds])
        speed_up = f"{base[mode.slowdown] / mode.median('group_seconds'):.2f}"
        others = [f"{mode.median(name):.1f}" for name in ("wait_seconds", "train_seconds", "staleness", "dropped")]
        rows.append((f"{mode.slowdown:g} x slower", mode.name, seconds, speed_up, *others))
    columns = ("rollouts", "mode", "s a group", "speed-up", "waits s", "trains s", "staleness", "dropped")
    return harness.table("4 prompts of 4 completions of at most 12 tokens", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("asynchronous", rounds=2, quick="one round of four steps, one slowdown, one bound")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1, 4], help="of rollouts")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4], help="bounds in policy versions")
    parser.add_argument("--steps", type=int, default=6, help="steps of a round, the first of which warms up")
    given = parser.parse(arguments)
    if given.quick:
        given.steps, given.slowdowns, given.staleness = 4, [4.0], [2]
    settings = {
        **QUESTIONS,
        "MODEL_NAME": given.model,
        "BATCH_SIZE": 4,
        "GROUP_SIZE": 4,
        "MAX_NEW_TOKENS": 12,
        "MAX_STEPS": given.steps,
        "OMP_NUM_THREADS": max(1, cores() // 2),
        # With an entropy term, groups without reward variance are computed as well.
        "ENTROPY_COEF": "1e-12",
        "LEARNING_RATE": "1e-9",
    }
    modes = modes_of(given.slowdowns, given.staleness)
    harness.in_turn(modes, given.rounds, lambda mode: mode.measure(settings))
    harness.finish(given, [show(modes)], {"settings": settings, "cores": cores(), "modes": modes})


if __name__ == "__main__":
    main()
