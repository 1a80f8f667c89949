"""evaluation/evaluate.yaml is what SkyPilot takes, and the scheduler launches it; it runs on this machine too."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from evaluation import skypilot
from evaluation.plan import Plan, Scheduler, ServerOptions
from evaluation.report import Results
from evaluation.run import evaluate as evaluate_plan
from evaluation.settings import EvaluationSettings
from services.core.errors import EXIT_FAILED, EXIT_RECOVERABLE
from tests.evaluation.conftest import ARITHMETIC
from tests.skypilot_facts import ROOT, SKYPILOT, skypilot_facts
from tests.waiting import LIMIT_SECONDS

YAML = ROOT / "evaluation" / "evaluate.yaml"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The scheduler's requests to SkyPilot, recorded by a script in SkyPilot's environment."""
    home = tmp_path_factory.mktemp("home")
    loaded = skypilot_facts()  # skips the test where there is no SkyPilot
    assert loaded
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("skypilot_script.py")
    done = subprocess.run(
        [SKYPILOT, script, home / "out.json"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((home / "out.json").read_text())


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


@pytest.mark.slow
def test_the_scheduler_launches_it_with_the_options_and_returns_the_results(told):
    assert told["results"] == {"metrics": {}}
    assert told["name"] == told["group"]["name"] == "evaluate-mine"
    assert told["group"]["primary"] == ["evaluate"]
    tasks = told["group"]["tasks"]
    assert {name: task["nodes"] for name, task in tasks.items()} == {
        "rollout-server": 3,
        "reward-server": 1,
        "evaluate": 1,
    }
    for task in tasks.values():
        assert (task["envs"]["MODEL_NAME"], task["envs"]["EVAL_SAMPLES"]) == ("some/model", "8")
        assert "HF_TOKEN" in task["secrets"]
    assert told["followed"] == [17, "evaluate", True]
    assert any("sky jobs cancel 17" in line for line in told["lines"])
    assert "(evaluate) bye" in told["lines"]
    assert not any("results.json" in line for line in told["lines"])


@pytest.mark.slow
def test_a_failed_launch_gives_its_reason(told):
    assert told["errors"]["no results"].startswith("DependencyLostError: job 17 ended with 1 and no results")
    assert told["errors"]["log"].startswith("DependencyLostError: the log of job 17 broke off (http://api")
    assert told["errors"]["no server"].startswith("ConfigurationError: SkyPilot did not launch evaluate-mine")


@pytest.mark.slow
def test_gpus_of_an_engine_and_a_model_of_this_machine_reach_the_nodes(told):
    tasks = told["group"]["tasks"]
    assert [list(gpus.values()) for gpus in tasks["rollout-server"]["gpus"]] == [[2]] * 4
    mounts = {name: task["mounts"] or {} for name, task in tasks.items()}
    assert set(mounts["rollout-server"]) == set(mounts["evaluate"]) == {"/models/mine"}
    assert mounts["reward-server"] == {}


def test_a_model_of_this_machine_is_uploaded_under_a_name_of_its_own(tiny_model, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(skypilot, "load", lambda *given: loaded.append(given))

    texts = {"model": "/models/x", "name": "x", "fingerprint": "f", "dataset": "arithmetic", "split": "test"}
    finished = Results(**texts, step=None, workflow="single-turn", prompts=0, samples_per_prompt=0, metrics={})
    monkeypatch.setattr(skypilot, "launch", lambda *_: finished.model_dump())
    for name, value in {"DATASET": "arithmetic", "INSTRUCTION": "Compute.", "REWARD_FN": "exact_match"}.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "run" / "policy" / "v000003"
    shutil.copytree(tiny_model, own)
    servers = ServerOptions(scheduler=Scheduler.SKYPILOT)
    settings = EvaluationSettings(eval_stop=["Q:"], chat_template_args={"enable_thinking": False}, eval_samples=2)
    plan = Plan(settings, models=[str(own)], run_dir=None, servers=servers, output=tmp_path / "out", variables={})
    asyncio.run(evaluate_plan(plan))
    [(_, _, variables, _, uploads)] = loaded
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
from evaluation import skypilot
from scripts import evaluate

def launch(*_):
    print("follows the log", flush=True)
    threading.Event().wait()

skypilot.load, skypilot.launch = lambda *_: None, launch
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


def test_without_skypilot_the_error_has_the_install_command(here):
    command = here("--scheduler", "skypilot", "--model", "some/model", "--dataset", "arithmetic")
    assert (command.code, "pip install 'skypilot[kubernetes]==" in command.text) == (78, True), command.text


@pytest.mark.e2e
@pytest.mark.slow
def test_the_same_job_group_runs_on_this_machine(tiny_model, tmp_path):
    variables = {**ARITHMETIC, "MODEL_NAME": str(tiny_model), "EVAL_SAMPLES": "2", "ROLLOUT_ENGINE": "embedded"}
    options = [option for name, value in variables.items() for option in ("--env", f"{name}={value}")]
    given = (YAML, "--plain", "--shared-dir", tmp_path, "--run-id", "e")
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
