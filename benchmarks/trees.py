"""Measure the trainer's update on agents' episodes as trees of tokens, against their sequences one by one.

    python -m benchmarks.trees [--model DIRECTORY] [--quick] [--json FILE]

Both sides train on the same sequences in the same processes of one rank. As trees, equal prefixes of a group are
computed once; one by one, every sequence is computed from its first token on. One agent appends to its history, so an
episode is one sequence; the other rewrites it, and every turn is a sequence. The default model has the widths of
SmolLM2-135M, fewer layers and random weights.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.harness import spread
from benchmarks.common.training import Work, run
from benchmarks.trainer import threads

TARGET = 2.5
"""The aim: how many times as fast trees are."""
AGENTS = {"appends to its history": False, "rewrites its history": True}


def show(work: Work, cases: Mapping[str, Sequence[Sequence[float]]]) -> Table:
    """Return tokens and seconds of both sides, and their ratio, as a table."""
    rows = []
    for name, (trees, apart) in cases.items():
        own = replace(work, rewrites_history=AGENTS[name])
        sides = [own, replace(own, shares_prompts=False)]
        tokens = [sum(group.tokens for group in side.groups(vocabulary=2**30, seed=0)) for side in sides]
        ratio = statistics.median(apart) / statistics.median(trees)
        rows.append((name, *map(str, tokens), spread(trees), spread(apart), f"{ratio:.2f}"))
    return harness.table(
        f"{work.prompts} groups of {work.group_size} episodes of {work.turns} turns: prompts of {work.prompt_tokens} "
        f"tokens, {work.completion_tokens} sampled a turn, results of {work.result_tokens}; {threads()} threads; "
        f"to reach: {TARGET} times as fast",
        ("the agent", "tokens, trees", "one by one", "seconds, trees", "one by one", "times as fast"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("trees", rounds=3, quick="one round")
    parser.add_argument("--model", help="model directory or name; a random model by default")
    sizes = {
        "prompts": 1,
        "group_size": 8,
        "turns": 4,
        "prompt_tokens": 400,
        "completion_tokens": 24,
        "result_tokens": 12,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    given = parser.parse(arguments)
    cases: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        if not given.model:
            given.model = directory
            models.make_random(Path(directory), models.FIFTH)
        work = harness.made_of(Work, given)
        for name, rewrites in AGENTS.items():
            cases[name] = []
            for shares in (True, False):
                [rank] = run(replace(work, rewrites_history=rewrites, shares_prompts=shares), 1, threads())
                cases[name].append(rank.seconds)
                harness.say(f"{name}, {'trees' if shares else 'one by one'}: {statistics.median(rank.seconds):.2f} s")
    harness.finish(given, [show(work, cases)], {"work": work, "seconds": cases})


if __name__ == "__main__":
    main()
