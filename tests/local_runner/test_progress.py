"""A run whose completions fail, or give nothing to learn from, says so: in its lines, at its end and in its status."""

import asyncio
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from local_runner import status, summary
from local_runner.nodes import Run
from local_runner.progress import Step
from local_runner.spec import TaskSpec
from local_runner.view import View, describe
from tests.local_runner.test_nodes import run_of

NO_REWARD = "none of 96 completions got a reward; all have 0. Look at the completions"
NO_SCORE = "no completion could be scored. Look at the completions"
EQUAL = "within each prompt's group, all rewards are equal (96 completions). Look at the completions"


TURNS = "session a-1 reached its limit of 3 turns (AGENT_MAX_TURNS); stop the agent's loop earlier"
BROKEN = "RuntimeError: shop database is down"


def lines(
    counts: list[list[tuple[float, int]]], trained: float = 0.0, failures: Sequence[tuple[str, int, str]] = ()
) -> list[bytes]:
    """Return a run's lines of metrics.jsonl, with the counts of each step's rewards, and each step's failures."""
    records = []
    for number, of_step in enumerate(counts, 1):
        record = {"step": number, "trained_tokens": trained, "reward_counts": of_step, "failures": failures}
        total = sum(count for _, count in of_step)
        if total:
            record["reward_mean"] = sum(reward * count for reward, count in of_step) / total
        records.append(json.dumps(record).encode() + b"\n")
    return records


RUNS = [
    (lines([[(0.0, 32)]] * 3), NO_REWARD),
    (lines([[]] * 3), NO_SCORE),
    (lines([[(0.0, 16), (1.0, 16)]] * 3), EQUAL),
    (lines([[(1.0, 32)]] * 3), EQUAL),
    (
        lines([[(0.0, 32)]] * 3, failures=[("exception", 6, BROKEN), ("limit", 2, TURNS)]),
        "none of 96 completions got a reward; all have 0. Failed completions have no reward, except",
    ),
]


def run_in(folder: Path, told: list[bytes]) -> Run:
    """Return a run in ``folder`` that has written the lines."""
    run = run_of(TaskSpec("ppo-trainer", ""))
    run = Run(run.group, run.run_id, folder, run.addresses)
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "metrics.jsonl").write_bytes(b"".join(told))
    return run


def shown_end(run: Run) -> str:
    console = Console(file=io.StringIO(), width=80)
    summary.show(console, run, None, {"reason": "done", "seconds": 9.0}, {})
    return console.file.getvalue()


def shown_status(run: Run) -> str:
    console = Console(file=io.StringIO(), width=400)
    asyncio.run(status.print_status(console, run.run_dir, None))
    return console.file.getvalue()


@pytest.mark.parametrize(("told", "said"), RUNS)
def test_the_lines_say_once_that_the_model_has_learned_nothing(told, said):
    console = Console(file=io.StringIO(), width=80)
    with View(run_of(TaskSpec("ppo-trainer", "")), console, live=False) as shown:
        for line in told[:2]:
            shown.step(Step.read(line))
        assert "The model has learned nothing" not in console.file.getvalue()
        for line in [*told[2:], *told]:
            shown.step(Step.read(line))
    assert console.file.getvalue().count(f"The model has learned nothing in 3 steps: {said}") == 1


@pytest.mark.parametrize(("told", "said"), [(told[:count], said) for told, said in RUNS for count in (1, 3)])
def test_the_end_and_the_status_of_a_run_say_that_the_model_has_learned_nothing(tmp_path, told, said):
    run = run_in(tmp_path, told)
    in_steps = "in 3 steps" if len(told) == 3 else "in the step"
    expected = f"The model has learned nothing {in_steps}: {said}".replace("96", str(32 * len(told)))
    for shown in (shown_end(run), shown_status(run)):
        assert expected in " ".join(shown.split())


@pytest.mark.parametrize("told", [[], lines([[(0.0, 32)]] * 3, trained=900.0)])
def test_a_run_that_changed_its_model_or_has_no_step_does_not_count_as_learning_nothing(tmp_path, told):
    run = run_in(tmp_path, told)
    assert "learned nothing" not in shown_end(run) + shown_status(run)


def test_a_steps_line_says_when_it_taught_nothing():
    unscored, zero = map(Step.read, lines([[], [(0.0, 8)]]))
    [trained] = map(Step.read, lines([[(0.0, 8)]], trained=64.0))
    assert describe(unscored, 0, None) == "step 1  no reward"
    assert describe(zero, 0, None) == "step 2  reward 0.000  equal rewards"
    assert describe(trained, 0, None) == "step 1  reward 0.000"


@pytest.mark.parametrize(
    ("trained", "failures", "share", "reason"),
    [
        # Those over a limit are among the rewards.
        (90.0, [("limit", 4, TURNS)], "4/4 (limit)", f"{TURNS}. Raise the limit, or end the episode before it"),
        (
            90.0,
            [("reward_over_limit", 2, "more than 1 s")],
            "2/4 (reward_over_limit)",
            "more than 1 s. Make the reward function faster or smaller",
        ),
        (
            0.0,
            [("exception", 4, BROKEN), ("limit", 1, TURNS)],
            "5/8 (exception 4, limit 1)",
            f"{BROKEN}. Correct the agent",
        ),
        (
            0.0,
            [("reward_error", 4, "my:f returned nan")],
            "4/8 (reward_error)",
            "my:f returned nan. Correct the reward",
        ),
        (
            0.0,
            [("turn_rewards", 4, "give one a call")],
            "4/8 (turn_rewards)",
            "give one a call. Look at the completions",
        ),
    ],
)
def test_failed_completions_are_counted_and_the_most_frequent_reason_told(tmp_path, trained, failures, share, reason):
    told = lines([[(1.0, 4)]] * 2, trained, failures)
    run = run_in(tmp_path, told)
    assert f"reward 1.000  failed {share}" in describe(Step.read(told[0]), 0, None)
    whole = re.sub(r"\d+", lambda number: str(2 * int(number[0])), share)
    for shown in (shown_end(run), shown_status(run)):
        said = " ".join(shown.replace("│", " ").split())
        assert f"failed completions {whole}" in said
        about = "Failed completions have no reward, except that those over a limit are wrong"
        assert f"{about}: {whole}. The most frequent failure: {reason}" in said
        assert ("The model has learned nothing in 2 steps" in said) == (trained == 0)
        assert "too easy" not in said, "the failures come first"


def test_a_step_of_several_sources_has_the_reward_of_each() -> None:
    line = b'{"step": 4, "reward_mean": 0.5, "reward_mean/game": 0.25, "reward_mean/sums": 0.75, "groups/sums": 2}\n'
    assert describe(Step.read(line), 9, None) == "step 4/9  reward 0.500 (game 0.250, sums 0.750)"
