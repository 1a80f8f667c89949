"""A run whose completions fail, or give nothing to learn from, says so: in its lines, at its end and in its status."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from local_runner.spec import TaskSpec
from local_runner.view import View, describe, present
from services.run_page.directory import Run
from services.run_page.progress import Step, advice, failed
from tests.local_runner.test_nodes import run_of

TURNS = "session a-1 reached its limit of 3 turns (AGENT_MAX_TURNS); stop the agent's loop earlier"
BROKEN = "RuntimeError: shop database is down"
LOOK = "Look at the completions"


def line(number=1, counts=(), trained=0.0, failures=()) -> bytes:
    """Return a step's line of metrics.jsonl."""
    record = {"step": number, "trained_tokens": trained, "reward_counts": counts, "failures": failures}
    if total := sum(count for _, count in counts):
        record["reward_mean"] = sum(reward * count for reward, count in counts) / total
    return json.dumps(record).encode() + b"\n"


def steps(count: int, *of_step) -> list[Step]:
    return [Step.read(line(number + 1, *of_step)) for number in range(count)]


@pytest.mark.parametrize(
    ("counts", "failures", "said"),
    [
        ([(0.0, 32)], [], "none of 96 completions got a reward; all have 0. Look at the completions"),
        ([], [], "no completion could be scored. Look at the completions"),
        ([(0.0, 16), (1.0, 16)], [], "all rewards are equal (96 completions). Look at the completions"),
        ([(1.0, 32)], [], "all rewards are equal (96 completions). Look at the completions"),
        # Rewards of the others say little where completions have failed.
        (
            [(0.0, 32)],
            [("exception", 6, BROKEN)],
            "none of 96 completions got a reward; all have 0. Failed completions",
        ),
    ],
)
def test_steps_that_gave_nothing_to_learn_from_are_explained(counts, failures, said):
    assert advice(steps(1, counts, 0.0, failures)).startswith("The model has learned nothing in the step: ")
    in_three = advice(steps(3, counts, 0.0, failures))
    assert in_three.startswith("The model has learned nothing in 3 steps: ")
    assert said in in_three
    assert advice([]) is advice(steps(3, [(0.0, 32)], 900.0)) is None
    assert "learned nothing" not in (advice(steps(3, counts, 900.0, failures)) or "")


@pytest.mark.parametrize(
    ("failures", "share", "remedy"),
    [
        # Those over a limit are among the rewards.
        ([("limit", 4, TURNS)], "8/8 (limit)", "Raise the limit, or end the episode before it"),
        ([("reward_over_limit", 2, "more than 1 s")], "4/8 (reward_over_limit)", "Make the reward function faster"),
        ([("exception", 4, BROKEN), ("limit", 1, TURNS)], "10/16 (exception 8, limit 2)", "Correct the agent"),
        ([("reward_error", 4, "my:f returned nan")], "8/16 (reward_error)", "Correct the reward"),
        ([("turn_rewards", 4, "give one a call")], "8/16 (turn_rewards)", LOOK),
    ],
)
def test_failed_completions_are_counted_and_the_most_frequent_reason_told(failures, share, remedy):
    both = steps(2, [(1.0, 4)], 90.0, failures)
    assert failed(both) == share
    assert f"{share}. The most frequent failure: {failures[0][2]}. {remedy}" in advice(both)
    assert f"reward 1.000  failed {failed(both[:1])}" in describe(both[0], 0, 0)


def test_the_advice_is_in_the_third_steps_line_once_and_with_the_figures_of_a_run(tmp_path: Path):
    taught_nothing = steps(3, [(0.0, 32)], 0.0, [("exception", 6, BROKEN)])
    console = Console(file=io.StringIO(), width=80)
    shown = View(run_of(TaskSpec("ppo-trainer", "")), console)
    for step in taught_nothing[:2]:
        shown.step(step)
    assert "The model has learned nothing" not in console.file.getvalue()
    for step in [taught_nothing[2], *taught_nothing]:
        shown.step(step)
    assert console.file.getvalue().count(advice(taught_nothing)) == 1
    whole = describe(taught_nothing[0], 0, 0)
    assert len(whole) > 80
    assert whole in console.file.getvalue().splitlines()
    lines = [line(number, [(0.0, 32)], 0.0, [("exception", 6, BROKEN)]) for number in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    console = Console(file=io.StringIO(), width=400)
    present(console, Run(tmp_path), "running", {}, {})
    words = " ".join(console.file.getvalue().split())
    assert advice(taught_nothing) in words
    assert "failed completions 18/114 (exception)" in words


def test_a_steps_line_says_when_it_taught_nothing_and_the_reward_of_each_source():
    told = [line(1), line(2, [(0.0, 8)]), line(3, [(0.0, 8)], 64.0)]
    of_sources = {"step": 4, "reward_mean": 0.5, "reward_mean/game": 0.25, "reward_mean/sums": 0.75, "groups/sums": 2}
    assert [describe(Step.read(one), 9, 0) for one in (*told, json.dumps(of_sources).encode())] == [
        "step 1/9  no reward",
        "step 2/9  reward 0.000  equal rewards",
        "step 3/9  reward 0.000",
        "step 4/9  reward 0.500 (game 0.250, sums 0.750)",
    ]


@pytest.mark.parametrize(
    ("rewards", "since"),
    [
        ([0.44, *[0.0] * 5], 2),
        ([0.1, 0.5, 0.4, 0.01, *[0.0] * 5], 4),
        ([0.44, *[0.0] * 4], None),
        ([0.44, *[0.0] * 5, 0.3], None),
        ([0.01, *[0.0] * 9], None),
        ([-1.0, *[0.0] * 9], None),
    ],
)
def test_a_reward_that_fell_to_nothing_is_said_with_the_step(rewards, since):
    of_run = [Step.read(line(number, [(reward, 8)], 900.0)) for number, reward in enumerate(rewards, 1)]
    found = re.search(r"since step (\d+)", advice(of_run) or "")
    assert (found and int(found[1])) == since
