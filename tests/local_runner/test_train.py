"""``train``: a run from Python, in the process of the caller, with the caller's rows and functions."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import datasets
import pandas
import pytest

from local_runner.train import Run, RunError, train
from services.core.errors import ConfigurationError
from services.core.processes import stop_signals
from services.run_page.directory import Run as Files
from tests.local_runner.conftest import Here
from tests.local_runner.machine import Command, Node, exits, stays, traps

TRAINER = "ppo-trainer"
SUMS = [{"question": f"{a}+1=", "answer": f"{a + 1}"} for a in (1, 2, 3)]


async def trains(node: Node) -> None:
    """Write what a trainer leaves behind; its summary has some of its variables."""
    run = Path("runs") / node.environment["RUN_ID"]
    (run / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.25}\n{"step": 2, "reward_mean": 0.5}\n')
    names = ("LEARNING_RATE", "SKYPILOT_NUM_NODES", "FORCE_COLOR")
    (run / "summary.json").write_text(json.dumps({name: node.environment.get(name) for name in names}))


def process_state() -> tuple[Any, ...]:
    return [signal.getsignal(number) for number in stop_signals()], dict(os.environ), sys.path[:], os.getcwd()


def test_a_run_has_its_summary_its_metrics_and_its_model_and_leaves_the_process_as_it_was(here: Here, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    before = process_state()

    async def in_a_notebook() -> Run:
        return train(job_group=here.group({TRAINER: trains}), nodes={TRAINER: 2}, learning_rate=2e-5)

    done = asyncio.run(in_a_notebook())
    assert process_state() == before
    here.check()
    assert done.summary == {"LEARNING_RATE": "2e-05", "SKYPILOT_NUM_NODES": "2", "FORCE_COLOR": ""}
    assert done.metrics["reward_mean"].to_dict() == {1: 0.25, 2: 0.5}
    assert done.model == done.directory / "model"
    assert "ppo-trainer-1 ended, exit code 0\n" in here.printed()
    assert "\x1b" not in here.output
    assert "grpo clean" not in here.output  # the commands for a terminal


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"learning_rat": 1}, "learning_rat is .*learning_rate"),
        ({"group_size": "many"}, "ppo-trainer: group_size is 'many'"),
        ({"batch_size": 500}, "batch_size is 500"),
        ({"job_group": "none.yaml"}, "none.yaml"),
    ],
)
def test_a_refusal_is_a_value_error_in_the_callers_words_and_leaves_no_run(here: Here, setting, named):
    given = {"job_group": here.group({TRAINER: stays, "data-server": stays}), "dataset": SUMS, "max_steps": 2}
    before = process_state()
    with pytest.raises(ValueError, match=f"^.*{named}"):
        train(**given | setting)
    assert process_state() == before
    assert here.printed() == ""
    assert not any(Path().glob("runs/*"))


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([], ValueError, "dataset has no rows"),
        (["what"], TypeError, "row 0 of dataset"),
        ([*SUMS, {"question": "1+2=", "answer": float("nan")}], ValueError, "row 3 of dataset: .* not JSON"),
        ([*SUMS, {"question": "1+2=", "answer": {1, 2}}], TypeError, "row 3 of dataset: .* not JSON"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_and_leave_no_run(here, rows, error, said):
    with pytest.raises(error, match=said):
        train(dataset=rows)
    assert not any(Path().glob("runs/*"))


def test_a_model_is_given_by_its_name_alone(here):
    with pytest.raises(TypeError, match="model_name is"):
        train(model_name=object, job_group=here.group({TRAINER: trains}))


def test_a_failed_run_raises_with_the_component_its_exit_code_and_its_log(here: Here):
    async def fails(node: Node) -> int:
        node.say("error: no such model")
        return 78

    with pytest.raises(RunError, match=r"exit code 78\): no such model; see runs/mine/logs/") as raised:
        train(job_group=here.group({TRAINER: stays, "rollout-server": fails}), run_id="mine")
    assert (raised.value.component, raised.value.exit_code) == ("rollout-server-0", 78)
    assert "no such model" in raised.value.log.read_text()


def longest(response: str, most: int = 10) -> float:
    """Calls another function of this module, which components cannot import."""
    return share(len(response), most)


def share(part: int, whole: int) -> float:
    return part / whole


READS = {"ppo_trainer": {"envs": {"REWARD_FN": "", "DATASET": "", "DATASET_TEST": ""}}}
"""What else a reward-server and a data-server would read."""
LOADS = """
import json, os
from services.core.imports import load_function
function = load_function("REWARD_FN", os.environ["REWARD_FN"])
rows = [json.loads(line) for line in open(os.environ["DATASET"])]
print(json.dumps([os.environ["REWARD_FN"], *(function(response=row["question"]) for row in rows)]))
"""


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (longest, "given_reward_fn:longest"),
        (lambda response: share(len(response), 10), "given_reward_fn:function"),
        (functools.partial(longest, most=10), "given_reward_fn:function"),
    ],
)
def test_components_have_the_rows_and_the_function(here: Here, function, name):
    rows = datasets.Dataset.from_list([{"question": "1" * length, "answer": "1"} for length in (1, 5)])

    async def loads(node: Node) -> None:
        printed = subprocess.run([sys.executable, "-c", LOADS], env=node.environment, capture_output=True, check=True)  # noqa: ASYNC221
        assert json.loads(printed.stdout) == [name, 0.1, 0.5]

    done = train(
        job_group=here.group({TRAINER: loads}, **READS), reward_fn=function, dataset=rows, batch_size=1, run_id="mine"
    )
    here.check()
    assert done.directory == Path("runs/mine")


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
def test_rows_are_written_with_their_values_and_have_the_name_of_what_was_given(here: Here, dataset, file, rows):
    given: list[str] = []

    async def reads(node: Node) -> None:
        given.append(node.environment["DATASET_TEST"])

    train(job_group=here.group({TRAINER: reads}, **READS), dataset_test=dataset, run_id="mine")
    assert given == [f"runs/mine/inputs/dataset_test/{file}"]
    assert [json.loads(line) for line in Path(given[0]).read_text().splitlines()] == rows


@pytest.fixture
def interrupts() -> Any:
    """Python's own handler of SIGINT, which the tests' shell may ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(done: list[str]) -> Command:
    async def command(node: Node) -> int | None:
        os.kill(os.getpid(), signal.SIGINT)
        return await traps(0.1, done=lambda: done.append("saved"))(node)

    return command


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_run_stops_in_order_and_then_interrupts_the_program(here: Here):
    saved: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(job_group=here.group({TRAINER: interrupting(saved), "reward-server": stays}), run_id="mine")
    here.check()
    assert saved == ["saved"]
    assert Files(Path("runs/mine")).outcome["reason"] == "stopped by SIGINT"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def checkpoints(node: Node) -> None:
    """Train one step, and write its checkpoint; wait for a signal where the checkpoint is to be forked from."""
    run = Path("runs") / node.environment["RUN_ID"]
    steps = int(node.environment.get("CHECKPOINT_EVERY", 2))
    lines = "".join(json.dumps({"step": step, "rate": node.environment["LEARNING_RATE"]}) + "\n" for step in (1, 2))
    (run / "metrics.jsonl").write_text(lines)
    checkpoint = run / f"checkpoints/step-{steps:06d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "state.json").write_text("{}")
    if "CHECKPOINT_EVERY" in node.environment:
        await stays(node)


@pytest.mark.parametrize(("at", "starts"), [(2, 1), (1, 2)])
def test_a_fork_runs_from_its_step_with_what_differs(here: Here, at, starts):
    run = train(job_group=here.group({TRAINER: checkpoints}), learning_rate=0.5, run_id="mine")
    here.machine.times.clear()
    forked = run.fork(at, learning_rate=0.25)
    here.check()
    assert forked.directory == Path(f"runs/mine-at-{at}")
    assert len(here.machine.times["ppo-trainer-0"]) == starts
    assert run.metrics["rate"][2] == "0.5"
    assert forked.metrics["rate"][2] == "0.25"
    for wrong in ({"at": 9}, {"at": 2, "run_id": "mine"}, {"at": 2, "run_id": "x", "learning_rat": 1}):
        with pytest.raises(RunError) as raised:
            run.fork(**wrong)
        assert raised.value.exit_code == 78


class Launcher:
    """A program in place of ``grpo launch``, and of ``sky``."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.refusal: Exception | None = None

    def main(self, words: list[str], **_: Any) -> int:
        self.words = words
        if self.refusal is not None:
            raise self.refusal
        return 7


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    made = Launcher()
    monkeypatch.setattr("scripts.grpo.load_command", lambda _: made)
    monkeypatch.setattr("local_runner.train._sky", lambda: "echo")
    return made


def test_a_launch_from_python_is_that_of_the_command_line(launcher: Launcher, capfd: pytest.CaptureFixture[str]):
    size: dict[str, Any] = {"gpus": "H100:8", "nodes": {"rollout-server": 4, TRAINER: 2}}
    job = train(infra="kubernetes", **size, model_name="Qwen/Qwen3-8B", max_steps=100, hf_token="hush")
    assert job.number == 7
    given = ["--env=MODEL_NAME=Qwen/Qwen3-8B", "--env=MAX_STEPS=100", "--secret=HF_TOKEN=hush"]
    sizes = ["--rollout-nodes", "4", "--trainer-nodes", "2"]
    assert launcher.words == ["--yes", "--gpus", "H100:8", *sizes, *given]
    job.cancel()
    assert capfd.readouterr().out == "jobs cancel --yes 7\n"
    for refusal in (ConfigurationError("too large"), click.UsageError("no such option")):
        launcher.refusal = refusal
        with pytest.raises(ValueError, match=r"too large|no such option"):
            train(infra="kubernetes", **size)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"gpus": None}, ValueError, "gpus"),
        ({"infra": "slurm"}, ValueError, "infra"),
        ({"nodes": {"data-server": 2}}, ValueError, "nodes names data-server"),
        ({"reward_fn": print}, TypeError, "reward_fn"),
        ({"dataset": [{"question": "1"}]}, TypeError, "dataset"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(launcher: Launcher, arguments: Any, error: Any, named: str) -> None:
    with pytest.raises(error, match=named):
        train(**{"infra": "kubernetes", "gpus": "H100:8"} | arguments)
    assert not launcher.words


def test_a_run_that_has_ended_is_not_run_again_and_a_failed_one_is(here: Here):
    with pytest.raises(RunError):
        train(job_group=here.group({TRAINER: exits(3)}), run_id="mine")
    assert train(job_group=here.group({TRAINER: trains}), run_id="mine").directory == Path("runs/mine")
