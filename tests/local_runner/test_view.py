"""The runner's output fits the terminal, and its times say what they measure."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from local_runner import summary
from local_runner.commands import Launch, next_commands
from local_runner.environment import Run
from local_runner.health import TrainerStatus
from local_runner.progress import Pace, Step
from local_runner.spec import TaskSpec
from local_runner.supervisor import Outcome, State
from local_runner.view import View, describe
from services.run_page.rewards import first_and_last
from tests.local_runner.test_environment import run_of

SECONDS = {"generate": 3.2, "score": 0.04, "store": 0.02, "train": 16.6, "publish": 3.9, "step": 23.9}
STEP = Step(step=4, reward=0.484, loss=-0.0395, seconds=SECONDS)


def test_a_line_that_goes_into_a_file_has_everything():
    assert describe(STEP, 10, 274) == (
        "step 4/10  reward 0.484  loss -0.0395  "
        "generate 3.2s score 0.0s store 0.0s train 16.6s publish 3.9s step 23.9s  4m34s left"
    )


def test_the_phase_that_scores_has_one_name_in_earlier_runs_too():
    for column in ("seconds_score", "seconds_reward"):
        step = Step.read(json.dumps({"step": 1, "reward_mean": 0.5, column: 2}).encode())
        assert step is not None
        assert step.seconds == {"score": 2.0}


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (110, "step 4/10  reward 0.484  loss -0.0395  generate 3.2s train 16.6s publish 3.9s step 23.9s  4m34s left"),
        (80, "step 4/10  reward 0.484  loss -0.0395  train 16.6s step 23.9s  4m34s left"),
        (50, "step 4/10  reward 0.484  loss -0.0395  4m34s left"),
        (40, "step 4/10  reward 0.484  4m34s left"),
    ],
)
def test_on_a_narrow_terminal_the_shortest_phases_are_left_out(width, line):
    assert describe(STEP, 10, 274, width) == line


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("has_ended", "phase"), [(False, "save"), (True, "ending")])
def test_after_the_last_step_the_view_names_the_phase_and_no_time_left(has_ended, phase):
    console, trainer = terminal(80), TaskSpec("ppo-trainer", "")
    with View(run_of(trainer), console, live=True) as shown:
        shown.trainer(TrainerStatus("train", 1, 2))
        shown.step(Step(1, 0.1, None))
        shown.step(Step(2, 0.2, None))
        shown.trainer(TrainerStatus("save", 2, 2))
        if has_ended:
            shown.state(trainer, 0, State.ENDED, "exit code 0")
    last = printed(console).rpartition("component")[2]
    assert f"step 2/2 reward 0.200 {phase} 0s" in last
    assert "left" not in last
    assert max(map(len, last.splitlines())) <= 80


def test_the_pace_is_known_between_the_second_and_the_last_step():
    pace = Pace()
    told = []
    for number in (1, 2, 3):
        pace.add(Step(number, 0.0, None))
        told.append(pace.seconds_left(3))
    assert told[0] is None
    assert told[1] is not None
    assert told[2] is None


@pytest.mark.parametrize(
    ("rewards", "label", "text"),
    [
        ([], "mean reward", "no step"),
        ([0.5], "mean reward", "0.500, of the only step"),
        ([0.25, 0.75], "mean reward, first to last step", "0.250 → 0.750"),
        ([0.0, 0.5, 0.9, 1.0, 0.0], "mean reward, first to last 2 steps", "0.250 → 0.500"),
        ([0.0, 0.0, 0.3, 0.9, 0.4, 0.4, 0.4], "mean reward, first to last 3 steps", "0.100 → 0.400"),
    ],
)
def test_first_and_last_rewards_are_of_different_steps(rewards, label, text):
    assert summary.reward_change(first_and_last(rewards)) == (label, text)


LAUNCH = Launch(
    Path("jobgroup.yaml"),
    env=["INSTRUCTION=Think, then answer."],
    env_files=[Path("demo.env")],
    secrets=["JOBGROUP_TOKEN"],
    num_nodes=["ppo-trainer=1"],
)


def ended(directory: Path) -> str:
    """Return the printed end of a run in ``directory``."""
    run = run_of(TaskSpec("ppo-trainer", ""))
    run = Run(run.group, run.run_id, directory, run.addresses)
    (run.run_dir / "model").mkdir(parents=True)
    (run.run_dir / "metrics.jsonl").write_text('{"step": 2, "reward_mean": 1}\n')
    records = [
        {"step": step, "prompt": f"{n} + 1 = ?", "completion": text, "reward": reward}
        for step, text, reward in ((0, "Let me see: it is", 0.0), (1, "6.", 0.0), (2, "7", 1.0))
        for n in range(4)
    ]
    (run.run_dir / "evaluations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    console = terminal(80)
    of_trainer = {"status": "succeeded", "steps": 2, "seconds": 167.0, **first_and_last([0.1, 0.9])}
    summary.show(console, run, LAUNCH, Outcome(0, "done", 222.0, {}), 10**9, of_trainer)
    return printed(console)


def test_the_end_of_a_run_shows_completions_before_and_after_times_and_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = ended(tmp_path)
    rows = [line.replace("│", " ").split() for line in said.splitlines()]
    assert ["2", "+", "1", "=", "?", "Let", "me", "see:", "it", "is", "7"] in rows
    assert not any(row[:5] == ["3", "+", "1", "=", "?"] for row in rows)
    assert ["time,", "from", "start", "to", "end", "3m42s"] in rows
    assert ["time", "of", "training,", "all", "attempts", "2m47s"] in rows
    assert "1 run takes 0 MB in runs/" in said
    for command in ("scripts.view runs/run-1", "scripts.evaluate --model runs/run-1/model --env-file demo.env"):
        assert f"-m {command}" in said


def test_the_command_that_resumes_is_the_given_one_without_secret_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_of(TaskSpec("ppo-trainer", ""))
    run = Run(run.group, run.run_id, tmp_path, run.addresses)
    (run.run_dir / "checkpoints" / "step-000002").mkdir(parents=True)
    commands = dict(next_commands(run, LAUNCH, {"status": "interrupted"}))
    assert commands["resume"].partition(" -m ")[2] == (
        "scripts.run_local jobgroup.yaml --env-file demo.env --env 'INSTRUCTION=Think, then answer.' "
        "--secret JOBGROUP_TOKEN --num-nodes ppo-trainer=1 --run-id run-1"
    )
