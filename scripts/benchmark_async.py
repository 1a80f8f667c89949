"""Measures the asynchronous against the synchronous job group at equal numbers of groups, alternating, in one run.

    python -m scripts.benchmark_async [--completion-tokens 24] [--steps 8] [--rounds 2] [--json FILE]

Both have one rollout node, one trainer node and half of the machine's cores for each, so that what is measured is the
overlap, not other shares. ``--completion-tokens`` makes generation as slow as wanted beside training. The time is that
from the end of the first step to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.job import run_job
from scripts.local.environment import cores


@dataclass
class Mode:
    """One of the two modes, and what was measured of it."""

    name: str
    job_group: str
    nodes: dict[str, int]
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
        waits = [sum(step.get(f"seconds_{name}", 0.0) for name in ("wait", "generate", "reward")) for step in later]
        self.generate_seconds.append(statistics.fmean(waits))
        self.train_seconds.append(statistics.fmean(step["seconds_train"] for step in later))
        self.staleness.append(statistics.fmean(step["staleness_mean"] for step in later))
        self.dropped.append(sum(step.get("groups_dropped_stale", 0.0) for step in later))


def show(modes: Sequence[Mode], title: str) -> Table:
    """Medians of the rounds, and the ratio to the first mode."""
    table = Table(title=title)
    for name in ("", "s a group", "from", "to", "ratio", "waits s", "trains s", "staleness", "dropped"):
        table.add_column(name, justify="right")
    base = statistics.median(modes[0].group_seconds)
    for mode in modes:
        seconds = statistics.median(mode.group_seconds)
        table.add_row(
            mode.name,
            f"{seconds:.2f}",
            f"{min(mode.group_seconds):.2f}",
            f"{max(mode.group_seconds):.2f}",
            f"{base / seconds:.2f}",
            f"{statistics.median(mode.generate_seconds):.1f}",
            f"{statistics.median(mode.train_seconds):.1f}",
            f"{statistics.median(mode.staleness):.1f}",
            f"{statistics.median(mode.dropped):.0f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark_async")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=24)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round, the first of which warms up")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    settings = {
        "MODEL_NAME": given.model,
        "BATCH_SIZE": given.prompts,
        "GROUP_SIZE": given.group_size,
        "MAX_NEW_TOKENS": given.completion_tokens,
        "MAX_STALENESS": given.max_staleness,
        "MAX_STEPS": given.steps,
        "OMP_NUM_THREADS": max(1, cores() // 2),
    }
    nodes = {"rollout-server": 1, "ppo-trainer": 1}
    modes = [
        Mode("synchronous", "jobgroup.yaml", nodes),
        Mode("asynchronous", "jobgroup-async.yaml", {**nodes, "collector": 1}),
    ]
    for number in range(given.rounds):
        for mode in modes:
            mode.add(run_job(mode.job_group, settings, mode.nodes))
            print(f"round {number + 1}, {mode.name}: {mode.group_seconds[-1]:.2f} s a group", file=sys.stderr)
    title = f"{given.prompts} prompts of {given.group_size} completions of at most {given.completion_tokens} tokens"
    Console().print(show(modes, title))
    if given.json:
        result = {"settings": settings, "cores": cores(), "modes": [asdict(mode) for mode in modes]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
