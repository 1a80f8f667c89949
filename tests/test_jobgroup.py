"""jobgroup.yaml is valid for SkyPilot, and correct where SkyPilot does not check it."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from local_runner import spec
from services.core.endpoints import Task
from services.core.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_RECOVERABLE
from services.core.restarts import EXIT_CRASHED
from tests.skypilot_facts import ROOT, skypilot_facts

JOBGROUP = ROOT / "jobgroup.yaml"

SERVICES = [Task.DATA_SERVER, Task.ROLLOUT_SERVER, Task.REWARD_SERVER, Task.REPLAY_BUFFER]
KILLED = 137
RESTARTS = re.escape(' || exit "$(python -m services.core.restarts $?)"')


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """Jobgroup.yaml as SkyPilot loads it."""
    return skypilot_facts()["files"]["jobgroup.yaml"]


@pytest.fixture(scope="module")
def tasks(loaded) -> dict[str, dict[str, Any]]:
    return loaded["tasks"]


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(JOBGROUP.read_text()))


def test_skypilot_loads_a_job_group_whose_primary_is_the_trainer(loaded):
    assert loaded["is_job_group"]
    assert loaded["primary_tasks"] == ["ppo-trainer"]
    assert sorted(loaded["auxiliary_tasks"]) == sorted(SERVICES)
    assert loaded["inter_connection"] is True


def test_the_volume_is_mounted_where_state_must_survive_and_many_may_write_to_it(tasks):
    volume = skypilot_facts()["volume"]
    mounted = {name for name, task in tasks.items() if task["volumes"] == {"/shared": volume["name"]}}
    assert {"rollout-server", "ppo-trainer", "replay-buffer", "data-server", "reward-server"} == mounted
    assert volume["config"]["access_mode"] == "ReadWriteMany"


def test_skypilot_is_told_when_to_recover(tasks):
    for name, task in tasks.items():
        assert "max_restarts_on_errors" not in task["recovery"], name
        assert task["recovery"]["recover_on_exit_codes"] == [EXIT_FAILED, EXIT_RECOVERABLE], name


def test_nothing_is_unknown_misspelt_or_repeated(documents):
    # The local runner's reader is strict where SkyPilot's is not: header keys, job_recovery keys, repeated keys.
    group = spec.load(JOBGROUP)
    assert [task.name for task in group.tasks] == [document["name"] for document in documents[1:]]
    for task in group.tasks:
        assert task.recover_on_exit_codes.isdisjoint({KILLED, EXIT_CONFIGURATION, EXIT_CRASHED})


def test_no_secret_is_written_down(documents):
    for document in documents[1:]:
        assert all(not value for value in document["secrets"].values())
        assert "JOBGROUP_TOKEN" in document["secrets"]
        assert not [name for name in document.get("envs", {}) if re.search("TOKEN|KEY|SECRET", name)]


def test_images_and_dependencies_are_pinned(documents):
    for document in documents[1:]:
        image = document["resources"]["image_id"]
        assert re.fullmatch(r"docker:[^:]+:[^:]*\d[^:]*", image), image
        installs = [line for line in document["setup"].splitlines() if line.strip().startswith("pip install")]
        assert len(installs) == 1
        assert "--constraint constraints.txt" in installs[0] or "'.[sglang]'" in installs[0]


def test_each_task_runs_one_short_command_that_takes_its_place(documents):
    for document in documents[1:]:
        assert document["workdir"] == "."
        first, command = document["run"].splitlines()
        assert first == "set -euo pipefail" == document["setup"].splitlines()[0]
        assert re.fullmatch(rf"python -m [\w.]+{RESTARTS}", command)
        assert re.search(rf"{RESTARTS}$", document["setup"].strip())


PIP = """#!/bin/sh
cd "$(dirname "$0")"
case $1 in
    list) cat packages ;;
    install) cp after packages; exit $(cat code) ;;
esac
"""


@pytest.mark.parametrize("before", ["pip 26.0\nsglang 0.0.0.dev\nnvidia-nccl-cu13 2.28.3\n", "pip 26.0\n"])
def test_the_log_of_engines_says_what_pip_replaced_in_the_image(documents, tmp_path: Path, before: str) -> None:
    [setup] = [document["setup"] for document in documents[1:] if document["name"] == "rollout-server"]
    after = ["sglang 0.5.23", "torch 2.14.1", "nvidia-nccl-cu13 2.30.7"]
    for name, content in ("packages", before), ("after", "\n".join(["pip 26.0", *after])), ("code", "0"):
        (tmp_path / name).write_text(content)
    for name, script in ("pip", PIP), ("python", "#!/bin/sh\necho $3\n"):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)

    def run() -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(["bash", "-c", setup], env=variables, capture_output=True, text=True, check=False)

    ended = run()
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [*before.splitlines()[1:], *after], "and nothing of other packages"
    (tmp_path / "code").write_text("33")
    assert run().returncode == 33, "what pip ends with"


ADDED = {
    "jobgroups/async.yaml": {"collector"},
    "jobgroups/agent.yaml": {"gateway"},
    "jobgroups/environment.yaml": {"gateway", "environment-server"},
    "jobgroups/sft.yaml": set(),
    "jobgroups/colocated.yaml": set(),
}
"""The tasks that a job group has besides those of jobgroup.yaml."""
VARIABLES = {
    "jobgroups/async.yaml": {"ppo-trainer": {"MODE": "async", "COLLECTOR_IN_PROCESS": "false"}},
    "jobgroups/agent.yaml": {"ppo-trainer": {"ROLLOUT": "agent", "AGENT": "evaluation.multiplying_agent:solve"}},
    "jobgroups/environment.yaml": {
        "ppo-trainer": {"ROLLOUT": "environment", "DATASET": "seeds"},
        "data-server": {"DATASET": "seeds"},
    },
    "jobgroups/sft.yaml": {
        "ppo-trainer": {"METHOD": "sft", "LEARNING_RATE": "1e-5", "DATASET": "rows.jsonl"},
        "data-server": {"METHOD": "sft", "DATASET": "rows.jsonl"},
    },
    "jobgroups/colocated.yaml": {
        "ppo-trainer": {
            "COLOCATE": "true",
            "ENGINE_SLEEPS": "true",
            "PUBLISH_TRANSPORT": "local",
            "ENGINE_MAX_TOTAL_TOKENS": 262144,
        }
    },
}
"""The variables in which a job group's tasks differ from those of jobgroup.yaml."""


def tasks_of(file: str) -> dict[str, dict[str, Any]]:
    return {document["name"]: document for document in yaml.safe_load_all((ROOT / file).read_text())}


@pytest.mark.parametrize("file", ADDED)
def test_every_job_group_repeats_the_tasks_of_the_first(file):
    expected, found = tasks_of("jobgroup.yaml"), tasks_of(file)
    for task, variables in VARIABLES[file].items():
        expected[task]["envs"] |= variables
    if file in ("jobgroups/agent.yaml", "jobgroups/environment.yaml"):
        # The trainer's node runs the agent, which may have OpenAI's client.
        setup = expected["ppo-trainer"]["setup"]
        expected["ppo-trainer"]["setup"] = setup.replace("[trainer$", "[trainer,evaluation$")
        added = found["ppo-trainer"]["setup"].removeprefix(expected["ppo-trainer"]["setup"])
        assert 'preset:*) python -m services.harnesses "${AGENT_COMMAND#preset:}" || exit "$(' in added
        expected["ppo-trainer"]["setup"] += added
    if file == "jobgroups/sft.yaml":  # nothing is sampled
        expected = {name: expected[name] for name in ("grpo", *VARIABLES[file])}
        del expected["grpo"]["termination_delay"]["replay-buffer"]
    if file == "jobgroups/colocated.yaml":  # the trainer's nodes run the engines
        del expected["rollout-server"]
        its, others = found["ppo-trainer"], expected["ppo-trainer"]
        assert its["setup"].splitlines()[:5] == others["setup"].splitlines()[:5], "the libraries of NCCL"
        assert its["run"].splitlines()[-1] == others["run"].splitlines()[-1]
        others["resources"] |= {key: its["resources"][key] for key in ("image_id", "memory")}
        others |= {key: its[key] for key in ("num_nodes", "setup", "run")}
    assert found.keys() - expected.keys() == ADDED[file]
    assert {name: found[name] for name in expected} == expected
