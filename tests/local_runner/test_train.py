"""``train``: a run from Python, with rows and functions of the caller's."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas
import pytest

from local_runner.train import RunError, train
from tests.local_runner.in_process import call
from tests.local_runner.runner import HEADER, is_running, task
from tests.waiting import LIMIT_SECONDS, bytes_in, wait_until

WRITES = """
cd runs/$RUN_ID
echo '{"step": 1, "reward_mean": 0.25}' > metrics.jsonl; echo '{"step": 2, "reward_mean": 0.5}' >> metrics.jsonl
echo "{\\"learning_rate\\": $LEARNING_RATE, \\"nodes\\": $SKYPILOT_NUM_NODES}" > summary.json
"""
LOADS = """
import json, os
from services.core.imports import load_function
function = load_function("REWARD_FN", os.environ["REWARD_FN"])
rows = [json.loads(line) for line in open(os.environ["DATASET"])]
print(os.environ["REWARD_FN"], [function(response=row["question"]) for row in rows])
"""
SUMS = [{"question": f"{a}+1=", "answer": f"{a + 1}"} for a in (1, 2, 3)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def group(*tasks: str) -> str:
    Path("group.yaml").write_text(HEADER + "".join(tasks))
    return "group.yaml"


Runs = Callable[[str], None]


@pytest.fixture
def runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Has a shell script run in place of ``grpo run``; its arguments are in the file ``arguments``."""

    def script(text: str) -> None:
        Path("runner.sh").write_text(f"echo $@ > arguments\n{text}\n")
        monkeypatch.setattr("local_runner.train.GRPO", ("sh", "runner.sh"))

    return script


def test_a_run_has_its_summary_its_metrics_and_its_model(here, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    done = train(job_group=group(task("ppo-trainer", WRITES)), nodes={"ppo-trainer": 2}, learning_rate=2e-5)
    assert done.summary == {"learning_rate": 2e-5, "nodes": 2}
    assert done.metrics["reward_mean"].to_dict() == {1: 0.25, 2: 0.5}
    assert done.model == done.directory / "model"
    printed = capfd.readouterr().out
    assert "ppo-trainer-1 ended, exit code 0\n" in printed
    assert "scripts." not in printed  # the commands for a terminal
    assert "\x1b" not in printed


@pytest.mark.usefixtures("asks_here")
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("LEARNING_RAT=1", "learning_rat is read by no component; the nearest setting is learning_rate"),
        ("GROUP_SIZE=many", "ppo-trainer: group_size is 'many'"),
        ("STEPS=3", "steps is read by no component; the nearest setting is max_steps"),
        ("BATCH_SIZE=500", "batch_size is 500, but the data have 2 prompts to train on, 6 in num_epochs=3"),
        ("UPDATES_PER_BATCH=9", "ppo-trainer: updates_per_batch is 9; allowed is at most batch_size (4)"),
    ],
)
def test_a_program_gets_refusals_in_its_callers_words(here, capfd, setting, said):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    words = ("--env=DATASET=rows.jsonl", "--env=MAX_STEPS=2", f"--env={setting}")
    group(task("ppo-trainer", "exit 0"), task("data-server", "exit 0"))
    assert call("run", "group.yaml", "--by-program", *words) == 78
    out, err = capfd.readouterr()
    assert (out, err.startswith(f"error: {said}")) == ("", True), err
    assert not any(here.glob("runs/*"))


def test_a_refusal_is_one_error_of_any_number_of_lines_and_leaves_no_run(here, runs, capfd):
    runs("echo 'error: group.yaml is not valid YAML: a\n  in line 3' >&2; exit 78")
    with pytest.raises(ValueError, match=r"^group\.yaml is not valid YAML: a\n  in line 3$"):
        train(job_group="group.yaml", dataset=SUMS)
    assert capfd.readouterr() == ("", "")
    assert not any(here.glob("runs/*"))


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([], ValueError, "dataset has no rows; give at least one"),
        (["what"], TypeError, "row 0 of dataset is 'what'; give rows as dicts"),
        ([*SUMS, "what"], TypeError, "row 3 of dataset is 'what'"),
        ([*SUMS, {"question": "1+2=", "answer": float("nan")}], ValueError, "row 3 of dataset: .* not JSON"),
        ([*SUMS, {"question": "1+2=", "answer": {1, 2}}], TypeError, "row 3 of dataset: .* not JSON"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_and_leave_no_run(here, rows, error, said):
    with pytest.raises(error, match=said):
        train(dataset=rows)
    assert not any(here.glob("runs/*"))


def test_a_failed_run_raises_with_the_component_its_exit_code_and_its_log(here, runs):
    record = {"reason": "rollout-server failed", "failed": "rollout-server-1"}
    runs(f"cd runs/mine; mkdir logs; echo 'error: no such model' > logs/rollout-server-1.log; echo end >> logs/*.log\n"
         f"echo '{json.dumps(record)}' > runner.json; exit 78")  # fmt: skip
    with pytest.raises(RunError, match=r"rollout-server-1 failed .* 78; error: no such model; see runs/") as raised:
        train(run_id="mine", nodes={"rollout-server": 2})
    assert (raised.value.component, raised.value.exit_code) == ("rollout-server-1", 78)
    assert "no such model" in raised.value.log.read_text()
    assert "--run-id mine" in Path("arguments").read_text()
    assert "--num-nodes=rollout-server=2" in Path("arguments").read_text()
    runs("echo the last line; exit 1")
    with pytest.raises(RunError, match="the local runner failed: the last line") as raised:
        train(run_id="mine")
    assert (raised.value.component, raised.value.exit_code) == (None, 1)


def longest(response: str, most: int = 10) -> float:
    """Calls another function of this module, which components cannot import."""
    return share(len(response), most)


def share(part: int, whole: int) -> float:
    return part / whole


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (longest, "given_reward_fn:longest"),
        (lambda response: share(len(response), 10), "given_reward_fn:function"),
        (functools.partial(longest, most=10), "given_reward_fn:function"),
    ],
)
def test_components_have_the_rows_and_the_function(here, runs, capfd, function, name):
    rows = datasets.Dataset.from_list([{"question": "1" * length, "answer": "1"} for length in (1, 5)])
    Path("loads.py").write_text(LOADS)
    runs(f"{sys.executable} loads.py")
    done = train(reward_fn=function, dataset=rows, batch_size=1, run_id="mine")
    assert done.directory == Path("runs/mine")
    assert capfd.readouterr().out == f"{name} [0.1, 0.5]\n"


def test_a_dataset_has_the_name_of_what_was_given(here, runs, capfd):
    loaded = datasets.Dataset.from_list(SUMS)
    loaded.info.dataset_name = "team/sums"
    runs("echo $DATASET $DATASET_TEST")
    train(dataset=loaded, dataset_test=[{"question": "1+2=", "answer": "3"}], run_id="mine")
    inputs = "runs/mine/inputs"
    assert capfd.readouterr().out == f"{inputs}/dataset/team-sums.jsonl {inputs}/dataset_test/rows.jsonl\n"
    arguments = Path("arguments").read_text().split()
    assert arguments[-2:] == ["--env=DATASET", "--env=DATASET_TEST"]


FRAME = [
    {"question": "1+1=", "answer": 9007199254740993, "level": 0.5, "day": "2024-01-02"},
    {"question": "1+2=", "answer": 3, "level": None, "day": None},
    {"question": "1+3=", "answer": 4, "level": 1.0, "day": "2024-01-03"},
]


@pytest.mark.parametrize("frame", [pandas.DataFrame(FRAME), SimpleNamespace(to_dicts=lambda: FRAME)])
def test_the_rows_of_a_dataframe_are_written_with_their_values(here, runs, capfd, frame):
    """The second is as one of polars."""
    runs("cat $DATASET")
    train(dataset=frame, run_id="mine")
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == FRAME


STOPS = "trap 'touch stopped; exit 0' TERM; touch started; while :; do sleep 0.05; done"
# Python has no handler where the tests' own shell ignores SIGINT, as it does for jobs in the background.
SCRIPT = """
import signal
from local_runner.train import train
signal.signal(signal.SIGINT, signal.default_int_handler)
train(job_group='group.yaml', run_id='mine')
"""


SERVES = "sleep 600 & echo $$ $! > pids.tmp; mv pids.tmp pids; wait"


def check_stops(here: Path, script: str, number: int, run: str) -> None:
    """Check that a run stops in order when the program that trains it gets a signal."""
    with (here / "output.txt").open("w") as output:
        program = subprocess.Popen([sys.executable, "-c", script], stdout=output, stderr=output)
    wait_until((here / "started").exists, run, progress=lambda: bytes_in(here))
    program.send_signal(number)
    assert program.wait(LIMIT_SECONDS) == -number
    record = here / "runs" / run / "runner.json"
    wait_until(record.exists, "the runner's record", progress=lambda: bytes_in(here))
    assert (here / "stopped").exists()
    assert json.loads(record.read_text())["reason"] == "stopped by SIGINT"


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGKILL, *SLOW])
def test_the_run_stops_in_order_when_its_program_is_interrupted_or_killed(here, number):
    group(task("ppo-trainer", f"until [ -e pids ]; do sleep 0.05; done; {STOPS}"), task("reward-server", SERVES))
    check_stops(here, SCRIPT, number, "mine")
    assert not any(map(is_running, map(int, (here / "pids").read_text().split())))


TRAINED = """
if [ -e trained ]; then until [ -e pids ]; do sleep 0.05; done; {stops}; fi
mkdir -p runs/mine/checkpoints/step-000001
echo '{{}}' > runs/mine/checkpoints/step-000001/state.json
echo '{{"step": 1}}' > runs/mine/metrics.jsonl
touch trained
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_fork_stops_in_order_when_its_program_is_interrupted_or_killed(here, number):
    group(task("ppo-trainer", TRAINED.format(stops=STOPS)), task("reward-server", SERVES))
    check_stops(here, SCRIPT.replace("run_id='mine')", "run_id='mine').fork(1)"), number, "mine-at-1")


LAUNCHES = """#!/bin/sh
echo "$@" > {folder}/arguments
echo "$HF_TOKEN" > {folder}/secret
echo 'memory of each node: 64 GB'
echo 'job 7; its log: sky jobs logs 7 ppo-trainer; to end it: sky jobs cancel 7'
"""


@pytest.fixture
def launcher(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of ``grpo``, and of ``sky``, that writes its arguments to a file."""
    program = here / "sky"
    program.write_text(LAUNCHES.format(folder=here))
    program.chmod(0o755)
    monkeypatch.setattr("local_runner.train.GRPO", (str(program),))
    monkeypatch.setenv("PATH", str(here), prepend=":")
    return here


def test_a_launch_from_python_is_that_of_the_command_line(launcher: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = train(
        infra="kubernetes",
        gpus="H100:8",
        nodes={"rollout-server": 4, "ppo-trainer": 2},
        model_name="Qwen/Qwen3-8B",
        max_steps=100,
        hf_token="hush",
    )
    assert job.number == 7
    assert (launcher / "arguments").read_text() == (
        "launch --yes --gpus H100:8 --rollout-nodes 4 --trainer-nodes 2 --env=MODEL_NAME=Qwen/Qwen3-8B "
        "--env=MAX_STEPS=100 --secret=HF_TOKEN\n"
    )
    assert (launcher / "secret").read_text() == "hush\n"
    assert "memory of each node" in capfd.readouterr().out
    job.cancel()
    assert (launcher / "arguments").read_text() == "jobs cancel --yes 7\n"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"infra": "kubernetes"}, ValueError, "give infra='kubernetes' and gpus"),
        ({"infra": "slurm", "gpus": "H100:8"}, ValueError, "give infra='kubernetes'"),
        ({"infra": "kubernetes", "gpus": "H100:8", "nodes": {"data-server": 2}}, ValueError, "nodes names data-server"),
        ({"infra": "kubernetes", "gpus": "H100:8", "reward_fn": print}, TypeError, "of a function its module:function"),
        ({"infra": "kubernetes", "gpus": "H100:8", "dataset": [{"question": "1"}]}, TypeError, "of rows a file"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(launcher: Path, arguments: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        train(**arguments)
    assert not (launcher / "arguments").exists()
