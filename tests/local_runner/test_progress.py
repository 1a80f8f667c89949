"""A run whose completions fail, or give nothing to learn from, says so: in its lines, at its end and in its status."""

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from local_runner.spec import TaskSpec
from local_runner.view import View, describe, present
from services.run_page.directory import Run
from services.run_page.progress import failed
from tests.local_runner.test_nodes import run_of

TURNS = "session a-1 reached its limit of 3 turns (AGENT_MAX_TURNS); stop the agent's loop earlier"
BROKEN = "RuntimeError: shop database is down"


def line(number=1, counts=(), trained=0.0, failures=()) -> bytes:
    """Return a step's line of metrics.jsonl."""
    record = {"step": number, "trained_tokens": trained, "reward_counts": counts, "failures": failures}
    if total := sum(count for _, count in counts):
        record["reward_mean"] = sum(reward * count for reward, count in counts) / total
    return json.dumps(record).encode() + b"\n"


def test_failed_completions_are_counted_with_their_reasons():
    both = [json.loads(line(1, [(1.0, 4)], 90.0, [("exception", 4, BROKEN), ("limit", 1, TURNS)]))] * 2
    assert failed(both) == "10/16 (exception 8, limit 2)"
    assert f"reward 1.000  failed {failed(both[:1])}" in describe(both[0], 0, 0)


def test_a_finding_is_shown_once_when_it_is_found_and_with_the_figures_of_a_run(tmp_path: Path):
    lines = [line(number, [(0.0, 32)], 0.0, [("exception", 6, BROKEN)]) for number in range(1, 6)]
    group = replace(run_of(TaskSpec("ppo-trainer", "")), shared_dir=tmp_path)
    group.run_dir.mkdir(parents=True)
    console = Console(file=io.StringIO(), width=80)
    shown = View(group, console)
    for number, one in enumerate(lines, 1):
        (group.run_dir / "metrics.jsonl").write_bytes(b"".join(lines[:number]))
        shown.step(json.loads(one))
        assert ("nothing learned" in console.file.getvalue()) is (number >= 3)
    assert console.file.getvalue().count("nothing learned") == 1
    whole = describe(json.loads(lines[0]), 0, 0)
    assert len(whole) > 80
    assert whole in console.file.getvalue().splitlines()
    console = Console(file=io.StringIO(), width=400)
    present(console, Run(group.run_dir), "running", {}, {})
    words = " ".join(console.file.getvalue().split())
    assert all(str(finding) in words for finding in Run(group.run_dir).findings())
    assert "failed completions 30/190 (exception)" in words


def test_a_steps_line_says_when_it_taught_nothing_and_the_reward_of_each_source():
    told = [line(1), line(2, [(0.0, 8)]), line(3, [(0.0, 8)], 64.0)]
    of_sources = {"step": 4, "reward_mean": 0.5, "reward_mean/game": 0.25, "reward_mean/sums": 0.75, "groups/sums": 2}
    assert [describe(json.loads(one), 9, 0) for one in (*told, json.dumps(of_sources).encode())] == [
        "step 1/9  no reward",
        "step 2/9  reward 0.000  equal rewards",
        "step 3/9  reward 0.000",
        "step 4/9  reward 0.500 (game 0.250, sums 0.750)",
    ]
