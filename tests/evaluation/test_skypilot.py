"""evaluation/evaluate.yaml is what SkyPilot takes, and the scheduler launches it; it runs on this machine too."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from evaluation import run as evaluation_run
from evaluation.metrics import Results
from evaluation.plan import Plan, Scheduler, ServerOptions
from evaluation.run import evaluate as evaluate_plan
from evaluation.settings import EvaluationSettings
from local_runner import skypilot as sky
from services.core.errors import EXIT_FAILED, EXIT_RECOVERABLE, ConfigurationError, DependencyLostError
from tests.evaluation.conftest import ARITHMETIC
from tests.skypilot_facts import ROOT, SKYPILOT, home_with_gpus, skypilot_facts
from tests.waiting import LIMIT_SECONDS

YAML = ROOT / "evaluation" / "evaluate.yaml"


def test_skypilot_loads_a_job_group_whose_primary_is_the_evaluation():
    loaded = skypilot_facts()["files"]["evaluation/evaluate.yaml"]
    assert loaded["is_job_group"]
    assert loaded["primary_tasks"] == ["evaluate"]
    assert sorted(loaded["auxiliary_tasks"]) == ["reward-server", "rollout-server"]
    assert loaded["inter_connection"] is True
    tasks = loaded["tasks"]
    assert {name for name, task in tasks.items() if task["accelerators"]} == {"rollout-server"}
    for task in tasks.values():
        assert task["recovery"]["recover_on_exit_codes"] == [EXIT_FAILED, EXIT_RECOVERABLE]
    # A recovered evaluation goes on from the samples on the volume.
    assert tasks["evaluate"]["volumes"] == {"/shared": skypilot_facts()["volume"]["name"]}
    assert tasks["evaluate"]["envs"]["EVAL_OUTPUT"].startswith("/shared/")


def test_its_servers_are_those_of_training():
    training = {d["name"]: d for d in list(yaml.safe_load_all((ROOT / "jobgroup.yaml").read_text()))[1:]}
    for document in list(yaml.safe_load_all(YAML.read_text()))[1:]:
        if document["name"] in training:
            assert document == training[document["name"]]


@pytest.fixture
def group(tmp_path):
    """The file of a job group with three servers of two GPUs and a model of this machine."""
    (tmp_path / "mine").mkdir()
    variables = {"MODEL_NAME": "/models/mine", "EVAL_STOP": '["Q:", "\\n"]', "EVAL_SAMPLES": "8"}
    text = evaluation_run.job_group("evaluate-mine", 3, 2, variables, {"/models/mine": str(tmp_path / "mine")})
    path = tmp_path / "group.yaml"
    path.write_text(text)
    return path


def test_the_job_group_has_the_servers_the_variables_and_the_model(group):
    header, *documents = yaml.safe_load_all(group.read_text())
    assert header["name"] == "evaluate-mine"
    tasks = {document["name"]: document for document in documents}
    assert [task.get("num_nodes", 1) for task in tasks.values()] == [3, 1, 1]
    assert tasks["rollout-server"]["resources"]["accelerators"] == ["H100:2", "H200:2", "A100-80GB:2", "L40S:2"]
    for name, task in tasks.items():
        envs = {"MODEL_NAME": "/models/mine", "EVAL_STOP": '["Q:", "\\n"]', "EVAL_SAMPLES": 8}
        assert task["envs"].items() >= envs.items()
        mounts = None if name == "reward-server" else {"/models/mine": str(group.with_name("mine"))}
        assert task.get("file_mounts") == mounts


@pytest.mark.slow
def test_skypilot_accepts_the_job_group(group, tmp_path, monkeypatch):
    assert skypilot_facts()  # skips the test where there is no SkyPilot
    monkeypatch.setenv("HOME", str(home_with_gpus(tmp_path / "home")))
    assert sky.ask(SKYPILOT, [group], {"HF_TOKEN": "secret"}, launch=False) == (None, "")


SKY = """#!/bin/sh
echo "(evaluate) $1 $2 $3 $4"
[ $3 = 17 ] && echo '(evaluate) results.json: {"metrics": {}}'
exit 5
"""


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Returns a function that sets SkyPilot's answer to a launch; job 17 has results."""
    (tmp_path / "sky").write_text(SKY)
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setattr(sky, "interpreter", lambda: tmp_path / "python")
    return lambda *answer: monkeypatch.setattr(sky, "ask", lambda *_, **__: answer)


def test_a_launched_job_is_followed_to_its_results(answers):
    answers(17, "")
    said = []
    assert evaluation_run.launch("", {}, said.append) == {"metrics": {}}
    assert "sky jobs cancel 17" in said[0]
    assert said[1:] == ["(evaluate) jobs logs 17 evaluate"]


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        ((18, ""), DependencyLostError, "job 18 ended with 5 and no results"),
        ((None, "ApiServerConnectionError: http://api"), ConfigurationError, "did not launch .* ApiServer"),
    ],
)
def test_a_launch_without_results_gives_its_reason(answers, answer, error, told):
    answers(*answer)
    with pytest.raises(error, match=told):
        evaluation_run.launch("", {}, lambda _: None)


def test_a_model_of_this_machine_is_uploaded_under_a_name_of_its_own(tiny_model, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(evaluation_run, "job_group", lambda *given: loaded.append(given))

    texts = {"model": "/models/x", "name": "x", "fingerprint": "f", "dataset": "arithmetic", "split": "test"}
    finished = Results(**texts, step=None, workflow="single-turn", prompts=0, samples_per_prompt=0, metrics={})
    monkeypatch.setattr(evaluation_run, "launch", lambda *_: finished.model_dump())
    for name, value in {"DATASET": "arithmetic", "INSTRUCTION": "Compute.", "REWARD_FN": "exact_match"}.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "run" / "policy" / "v000003"
    shutil.copytree(tiny_model, own)
    servers = ServerOptions(scheduler=Scheduler.SKYPILOT)
    settings = EvaluationSettings(eval_stop=["Q:"], chat_template_args={"enable_thinking": False}, eval_samples=2)
    plan = Plan(settings, model=str(own), run_dir=None, servers=servers, output=tmp_path / "out", variables={})
    asyncio.run(evaluate_plan(plan))
    [(name, _, _, variables, uploads)] = loaded
    assert name == "evaluate-v000003"
    [(path, source)] = uploads.items()
    assert source == str(own)
    assert path.startswith("/models/v000003-")
    assert variables["MODEL_NAME"] == path
    given = {name: variables[name] for name in ("EVAL_STOP", "CHAT_TEMPLATE_ARGS", "EVAL_SAMPLES")}
    assert given == {"EVAL_STOP": '["Q:"]', "CHAT_TEMPLATE_ARGS": '{"enable_thinking": false}', "EVAL_SAMPLES": "2"}
    # Exported here, where no node of the job sees it.
    assert (variables["INSTRUCTION"], variables["REWARD_FN"]) == ("Compute.", "exact_match")
    assert not {"JOBGROUP_TOKEN", "SHARED_DIR", "EVAL_OUTPUT"}.intersection(variables)
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (results["model"], results["name"], results["step"]) == (str(own), "v000003", 3)


FOLLOWED = """
import threading, typer
from evaluation import run
from scripts import evaluate

def launch(*_):
    print("follows the log", flush=True)
    threading.Event().wait()

run.launch = launch
typer.run(evaluate.main)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_command_while_the_job_goes_on(tmp_path):
    options = ["--scheduler", "skypilot", "--model", "some/model", "--dataset", "arithmetic"]
    command = [sys.executable, "-c", FOLLOWED, *options, "--output", tmp_path / "out"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "follows the log\n"
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "stopped by SIGINT; a job that was launched continues; see sky jobs queue" in said


def test_without_skypilot_the_error_has_the_install_command(here, monkeypatch):
    monkeypatch.setattr(sky, "interpreter", lambda: None)
    command = here("--scheduler", "skypilot", "--model", "some/model", "--dataset", "arithmetic")
    assert (command.code, "pip install 'skypilot[kubernetes]==" in command.text) == (78, True), command.text


@pytest.mark.e2e
@pytest.mark.slow
def test_the_same_job_group_runs_on_this_machine(tiny_model, tmp_path):
    variables = {**ARITHMETIC, "MODEL_NAME": str(tiny_model), "EVAL_SAMPLES": "2", "ROLLOUT_ENGINE": "embedded"}
    options = [option for name, value in variables.items() for option in ("--env", f"{name}={value}")]
    given = (YAML, "--shared-dir", tmp_path, "--run-id", "e")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.grpo", "run", *given, *options],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    logs = "\n".join(log.read_text() for log in (tmp_path / "runs/e/logs").glob("evaluate*.log"))
    assert done.returncode == 0, done.stdout + logs
    assert "results.json: {" in logs
    [results] = (tmp_path / "evaluations").glob("*/results.json")
    assert json.loads(results.read_text())["metrics"]["greedy pass@1"]["prompts"] == 20
