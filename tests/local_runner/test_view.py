"""The runner's output fits the terminal, and its times say what they measure."""

import io
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from local_runner.launch import Launch, next_commands
from local_runner.nodes import Addresses, LocalRun
from local_runner.run import _show_end
from local_runner.spec import TaskSpec
from local_runner.supervisor import State
from local_runner.view import View, describe, outcome_rows, reward_change
from services.run_page import progress
from services.run_page.progress import first_and_last
from tests.local_runner.test_nodes import run_of

WAIT = "waiting for 2 rollout workers"
SECONDS = {"generate": 3.2, "score": 0.04, "store": 0.02, "train": 16.6, "publish": 3.9, "step": 23.9}
STEP = {"step": 4, "reward_mean": 0.484, "loss": -0.0395} | {f"seconds_{name}": s for name, s in SECONDS.items()}


def test_a_line_that_goes_into_a_file_has_everything():
    assert describe(STEP, 10, 274) == (
        "step 4/10  reward 0.484  loss -0.0395  generate 3.2s train 16.6s publish 3.9s step 23.9s  4m34s left"
    )


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_step_is_shown_with_the_time_that_is_left():
    console, trainer = terminal(80), TaskSpec("ppo-trainer", "")
    shown = View(run_of(trainer), console)
    shown.trainer(stats("train"))
    for number in (1, 2):
        shown.step({"step": number, "reward_mean": number / 10, "seconds_step": 90.0})
    assert "step 2/3  reward 0.200  step 90.0s  1m30s left" in printed(console)


def stats(phase: str, what: str = "", seconds: float = 0.0) -> dict[str, Any]:
    """Return the reply of a trainer's /stats, whose activity began so many seconds ago."""
    activity = {"what": what, "done": "", "since": time.time() - seconds, "until": None}
    return {"phase": phase, "total_steps": 3, "activity": activity}


def test_a_wait_of_ten_seconds_is_printed_and_again_after_ten_more(monkeypatch):
    console = Console(file=io.StringIO(), width=80)
    shown = View(run_of(TaskSpec("ppo-trainer", "")), console)
    shown.trainer(stats("publish", WAIT, 9))
    assert WAIT not in printed(console)
    for _ in range(5):
        shown.trainer(stats("publish", WAIT, 11))
    assert printed(console).count(WAIT) == 1
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    shown.trainer(stats("publish", WAIT, 22))
    assert printed(console).count(WAIT) == 2
    shown.step(STEP)
    shown.trainer(stats("publish", WAIT, 33))
    assert printed(console).count(WAIT) == 2, "steps come less often than such lines would"


def test_before_the_trainer_answers_it_says_which_components_are_missing(monkeypatch):
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    tasks = [TaskSpec(name, "") for name in ("ppo-trainer", "reward-server", "data-server")]
    run = run_of(*tasks)
    ports = {"ppo-trainer-0:8004": "t:1", "reward-server-0:8002": "r:1", "data-server-0:8000": "d:1"}
    run = LocalRun(run.group, run.run_id, run.shared_dir, Addresses(run.addresses.hosts, ports), run.gpus, run.mark)
    console = Console(file=io.StringIO(), width=80)
    shown = View(run, console)
    for task in tasks:
        shown.state(task, 0, State.RUNNING, "pid 1")
    shown.up("data-server", 0)
    shown.trainer(None)
    assert "waiting for ppo-trainer-0, reward-server-0, 1 of 3 up, for 0 s" in printed(console)
    shown.up("ppo-trainer", 0)
    before = printed(console)
    shown.trainer(None)
    assert printed(console) == before, "a trainer at work may be too busy to answer"


@pytest.mark.parametrize(
    ("rewards", "label", "text"),
    [
        ([], "mean reward", "none"),
        ([0.5], "mean reward", "0.500, of the only step"),
        ([0.25, 0.75], "mean reward, first to last step", "0.250 → 0.750"),
        ([0.0, 0.5, 0.9, 1.0, 0.0], "mean reward, first to last 2 steps", "0.250 → 0.500"),
        ([0.0, 0.0, 0.3, 0.9, 0.4, 0.4, 0.4], "mean reward, first to last 3 steps", "0.100 → 0.400"),
    ],
)
def test_first_and_last_rewards_are_of_different_steps(rewards, label, text):
    assert reward_change(first_and_last(rewards)) == (label, text)


def accuracy(when: str, *values: float) -> dict[str, float]:
    parts = ("", "_low", "_high", "_prompts")
    return {f"accuracy_{when}{part}": value for part, value in zip(parts, values, strict=True)}


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        (
            {"accuracy_before": None} | accuracy("after", 1.0, 0.8389, 1.0, 20),
            [("accuracy before", "not measured"), ("accuracy after, 20 held-out prompts", "1.000 (0.839 to 1.000)")],
        ),
        (
            accuracy("before", 0.5, 0, 1, 1) | accuracy("after", 1, 1, 1, 1),
            [
                ("accuracy before, 1 held-out prompt", "0.500 (0.000 to 1.000)"),
                ("accuracy after, 1 held-out prompt", "1.000 (1.000 to 1.000)"),
            ],
        ),
        (
            {"accuracy_before": 0.5, "accuracy_after": None, "evaluation_error": "none got a completion"},
            [("last evaluation", "no accuracy: none got a completion")],
        ),
        ({"rows": 20, "rows_left_out": {"no ground truth": 1}}, [("rows left out", "1 of 20 (no ground truth)")]),
        (
            {"rows": 20, "rows_left_out": {"no question": 1, "too long": 2}},
            [("rows left out", "3 of 20 (too long 2, no question 1)")],
        ),
        ({"rows": 20, "rows_left_out": None}, []),
    ],
)
def test_the_end_of_a_run_has_its_accuracies_and_the_rows_that_were_left_out(found, rows):
    assert [*outcome_rows({}, found)] == rows


LAUNCH = Launch(
    Path("jobgroup.yaml"),
    env=["INSTRUCTION=Think, then answer."],
    env_files=[Path("examples/demo.env")],
    secrets=["JOBGROUP_TOKEN"],
    num_nodes=["ppo-trainer=1"],
)


def test_the_end_of_a_run_shows_times_sizes_and_commands_short_where_grpo_was_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".venv/bin/grpo"), "run"])
    run = run_of(TaskSpec("ppo-trainer", ""))
    run = LocalRun(run.group, run.run_id, tmp_path, run.addresses)
    (run.run_dir / "model").mkdir(parents=True)
    (run.run_dir / "metrics.jsonl").write_text('{"step": 2, "reward_mean": 1}\n')
    console = terminal(80)
    of_trainer = {"status": "succeeded", "steps": 2, "seconds": 167.0, **first_and_last([0.1, 0.9])}
    outcome = {"exit_code": 0, "reason": "done", "seconds": 222.0, "restarts": {}}
    _show_end(run, LAUNCH, console, of_trainer, outcome)
    said = printed(console)
    rows = [line.replace("│", " ").split() for line in said.splitlines()]
    assert ["time", "of", "last", "attempt", "3m42s"] in rows
    assert ["time", "of", "training,", "all", "attempts", "2m47s"] in rows
    assert "directory  runs/run-1, disk space " in said
    evaluate = "evaluate --model runs/run-1/model --env-file examples/demo.env --env 'INSTRUCTION=Think, then answer.'"
    for command in ("view runs/run-1", "chat runs/run-1", evaluate):
        assert f"  .venv/bin/grpo {command}" in said
    assert Launch(Path("jobgroup.yaml"), small=True).again("run-1") == (
        [".venv/bin/grpo", "run", "jobgroup.yaml", "--small", "--run-id", "run-1"]
    )


def after(launch: Launch, exit_code: int, directory: Path, *tasks: TaskSpec, has_checkpoint: bool = True) -> dict:
    """Return the commands, by purpose, at the end of a run in ``directory`` that has a model if it succeeded."""
    group = run_of(*(tasks or [TaskSpec("ppo-trainer", "")]))
    run = LocalRun(group.group, group.run_id, directory, group.addresses)
    for made in ["model"] * (not exit_code) + ["checkpoints/step-000004"] * has_checkpoint:
        (run.run_dir / made).mkdir(parents=True)
    summary = {"status": "failed" if exit_code else "succeeded", "steps": 4}
    return dict(next_commands(run, launch, summary, exit_code))


@pytest.mark.parametrize(
    ("exit_code", "has_checkpoint", "purpose"),
    [
        (1, False, "start again"),
        (78, False, "start again, after the correction"),
        (78, True, "resume, after the correction"),
        (130, True, "resume"),
        (0, True, "train on"),
        (0, False, None),
    ],
)
def test_a_run_can_go_on_or_start_again(tmp_path, monkeypatch, exit_code, has_checkpoint, purpose):
    monkeypatch.chdir(tmp_path)
    commands = after(LAUNCH, exit_code, tmp_path, has_checkpoint=has_checkpoint)
    going_on = {name: command for name, command in commands.items() if " run jobgroup.yaml " in command}
    assert list(going_on) == ([] if purpose is None else [purpose])
    assert ("evaluate" in commands) == (exit_code == 0)
    for command in going_on.values() if exit_code else ():
        assert " ".join(shlex.split(command)[1:]) == (
            "run jobgroup.yaml --env-file examples/demo.env --env INSTRUCTION=Think, then answer. "
            "--secret JOBGROUP_TOKEN --num-nodes ppo-trainer=1 --run-id run-1"
        )


@pytest.mark.parametrize(
    ("env", "variables", "options"),
    [
        (["MAX_STEPS=3", "SEED=1", "MAX_STEPS=4"], {"MAX_STEPS": "4"}, ["SEED=1", "MAX_STEPS=8", "NUM_EPOCHS=6"]),
        # It has ended with its prompts.
        (["NUM_EPOCHS=1"], {"NUM_EPOCHS": "1"}, ["NUM_EPOCHS=2"]),
    ],
)
def test_the_command_that_trains_on_gives_each_variable_once(tmp_path, monkeypatch, env, variables, options):
    monkeypatch.chdir(tmp_path)
    launch, trainer = Launch(Path("jobgroup.yaml"), env=env), TaskSpec("ppo-trainer", "", environment=variables)
    command = after(launch, 0, tmp_path, trainer)["train on"]
    given = "".join(f" --env {option}" for option in options)
    assert command.partition(" jobgroup.yaml")[2] == f"{given} --run-id run-1"


def test_an_evaluation_is_offered_unless_it_needs_the_environments_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("API_KEY", "hush")
    monkeypatch.setenv("MAX_STEPS", "4")
    launch = Launch(Path("g.yaml"), env=["MAX_STEPS", "SEED=1", "API_KEY"], env_files=[Path("shop.env")])
    for rollout, offered in ("completion", True), ("environment", False):
        own = {"MODEL_NAME": "m", "ROLLOUT": rollout, "EVAL_PROMPTS": "0"}
        commands = after(launch, 0, tmp_path / rollout, TaskSpec("ppo-trainer", "", environment=own))
        assert ("evaluate" in commands) is offered
        if offered:
            options = commands["evaluate"].partition("/model ")[2]
            assert options == "--env-file shop.env --env MAX_STEPS=4 --env SEED=1 --env API_KEY"


FAILURE = "reward_error: mine:score: LookupError: no answer (mine.py, line 3, in score)"


def test_the_first_failed_answer_is_told_once_when_it_happens():
    console = Console(file=io.StringIO(), width=80)
    shown = View(run_of(TaskSpec("ppo-trainer", "")), console)
    for text in ("", FAILURE, FAILURE, "", FAILURE):
        shown.failure(text)
    assert f"an answer failed: {FAILURE}" in printed(console)
    assert printed(console).count(FAILURE) == 1


def test_a_steps_line_has_what_its_most_frequent_failure_says():
    failures = [
        ("reward_error", 15, "mine:score: LookupError: no answer (mine.py, line 3, in score)"),
        ("limit", 1, "429"),
    ]
    step = {"step": 1, "reward_mean": 0.0, "seconds_step": 1.0, "reward_counts": [(0.0, 1)], "failures": failures}
    line = describe(step, 10, 0)
    assert line == f"step 1/10  reward 0.000  failed 16/16 (reward_error 15, limit 1)  step 1.0s  {FAILURE}"
