"""``train``: a run from Python, with the caller's rows and functions."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas
import pytest

from local_runner.train import RunError, _text, train
from services.run_page.directory import Run as Files
from tests.local_runner.runner import HEADER, is_running, task
from tests.waiting import LIMIT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
TRAINER = "ppo-trainer"
SUMS = [{"question": f"{a}+1=", "answer": f"{a + 1}"} for a in (1, 2, 3)]
READS = {"envs": {"REWARD_FN": "", "DATASET": ""}}
"""Settings that a reward-server and a data-server would read, too."""
TRAINS = """
import json, os
from pathlib import Path
from services.core.imports import load_function
run = Path("runs") / os.environ["RUN_ID"]
function = load_function("REWARD_FN", os.environ["REWARD_FN"])
rewards = [function(response=json.loads(line)["question"]) for line in open(os.environ["DATASET"])]
lines = [json.dumps({"step": step, "reward_mean": reward}) for step, reward in enumerate(rewards, 1)]
(run / "metrics.jsonl").write_text("\\n".join(lines))
names = ("LEARNING_RATE", "SKYPILOT_NUM_NODES", "REWARD_FN")
(run / "summary.json").write_text(json.dumps({name: os.environ.get(name) for name in names}))
"""
"""A trainer that scores its rows."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trains.py").write_text(TRAINS)
    return tmp_path


def group(*tasks: str) -> str:
    Path("group.yaml").write_text(HEADER + "".join(tasks))
    return "group.yaml"


def longest(response: str) -> float:
    return len(response) / 10


def test_a_run_has_its_summary_its_metrics_and_its_model(capfd: pytest.CaptureFixture[str]):
    rows = datasets.Dataset.from_list([{"question": "1" * length, "answer": "1"} for length in (1, 5)])
    job_group = group(task(TRAINER, f"{shlex.quote(sys.executable)} trains.py", **READS))
    done = train(
        job_group=job_group, nodes={TRAINER: 2}, learning_rate=2e-5, reward_fn=longest, dataset=rows, batch_size=1
    )
    assert done.summary == {"LEARNING_RATE": "2e-05", "SKYPILOT_NUM_NODES": "2", "REWARD_FN": f"{__name__}:longest"}
    assert done.metrics["reward_mean"].to_dict() == {1: 0.1, 2: 0.5}
    assert done.model == done.directory / "model"
    assert "ppo-trainer-1 ended, exit code 0\n" in capfd.readouterr().out


SCRIPT = """
from skypilot_grpo import train

def rounded(response: str) -> float:
    import math
    return math.ceil(len(response) / 2)

def outer(response: str) -> float:
    return helper(response)

def helper(response):
    return 1.0

if __name__ == "__main__":
    try:
        train(reward_fn=outer)
    except TypeError as error:
        print(error)
    run = train(job_group="group.yaml", reward_fn=rounded, dataset=[{"question": "123", "answer": "1"}], batch_size=1)
    print("reward", run.metrics["reward_mean"][1])
"""


def test_a_function_of_a_script_stands_alone(here: Path):
    group(task(TRAINER, f"{shlex.quote(sys.executable)} trains.py", **READS))
    (here / "skypilot_grpo").symlink_to(ROOT)
    (here / "mine.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert "reward_fn uses helper of this script" in done.stdout
    assert "reward 2\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("setting", "named"), [({"learning_rat": 1}, "LEARNING_RATE"), ({"job_group": "none.yaml"}, "none.yaml")]
)
def test_a_refusal_is_a_value_error_and_leaves_no_run(setting: dict[str, Any], named: str):
    given = {"job_group": group(task(TRAINER, "exit 3")), "dataset": SUMS}
    with pytest.raises(ValueError, match=named):
        train(**given | setting)
    assert not any(Path().glob("runs/*"))


@pytest.mark.parametrize(
    ("setting", "error", "said"),
    [
        ({"dataset": []}, ValueError, "dataset has no rows"),
        ({"dataset": ["what"]}, TypeError, "row 0 of dataset"),
        ({"dataset": [*SUMS, {"answer": float("nan")}]}, ValueError, "row 3 of dataset: .* not JSON"),
        ({"dataset": [*SUMS, {"answer": {1, 2}}]}, TypeError, "row 3 of dataset: .* not JSON"),
        ({"model_name": object}, TypeError, "model_name is"),
        ({"reward_fn": lambda response: 1.0}, TypeError, "reward_fn is"),
        ({"reward_fn": functools.partial(longest, "")}, TypeError, "reward_fn is"),
    ],
)
def test_what_has_no_text_is_refused_and_leaves_no_run(setting: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        train(**setting)
    assert not any(Path().glob("runs/*"))


def test_a_failed_run_raises_with_the_component_its_exit_code_and_its_log():
    job_group = group(task(TRAINER, "sleep 60"), task("rollout-server", "echo error: no such model; exit 78"))
    with pytest.raises(RunError, match=r"exit code 78\): no such model; see runs/mine/logs/") as raised:
        train(job_group=job_group, run_id="mine")
    assert (raised.value.component, raised.value.exit_code) == ("rollout-server-0", 78)
    assert "no such model" in raised.value.log.read_text()


FRAME = [
    {"question": "1+1=", "answer": 9007199254740993, "level": 0.5, "day": "2024-01-02"},
    {"question": "1+2=", "answer": 3, "level": None, "day": None},
]
NAMED = datasets.Dataset.from_list(SUMS)
NAMED.info.dataset_name = "team/sums"


@pytest.mark.parametrize(
    ("dataset", "file", "rows"),
    [
        (NAMED, "team-sums.jsonl", SUMS),
        (pandas.DataFrame(FRAME), "rows.jsonl", FRAME),
        (SimpleNamespace(to_dicts=lambda: FRAME), "rows.jsonl", FRAME),  # as one of polars
    ],
)
def test_rows_are_written_with_their_values_and_have_the_name_of_what_was_given(
    here: Path, dataset: Any, file: str, rows: list[dict[str, Any]]
):
    given = _text("dataset_test", dataset, here)
    assert given == str(here / "dataset_test" / file)
    assert [json.loads(line) for line in Path(given).read_text().splitlines()] == rows


WAITS = "trap 'touch saved; exit 0' TERM; echo $$ > pid.tmp; mv pid.tmp pid; while :; do sleep 0.1; done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_stops_in_order_when_its_program_is_interrupted_or_killed(here: Path, number: signal.Signals):
    group(task(TRAINER, WAITS))
    call = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from local_runner.train import train"
    )
    command = [sys.executable, "-c", f"{call}; train(job_group='group.yaml', run_id='mine')"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        wait_until((here / "pid").exists, "the trainer")
        program.send_signal(number)
        _, errors = program.communicate(timeout=LIMIT_SECONDS)
    wait_until(lambda: not is_running(int((here / "pid").read_text())), "the end of the trainer")
    assert (here / "saved").exists()
    wait_until((here / "runs/mine/runner.json").exists, "the runner's record")
    assert Files(here / "runs/mine").outcome["exit_code"] == 128 + (2 if number is signal.SIGINT else 15)
    assert (b"KeyboardInterrupt" in errors) == (number is signal.SIGINT)
