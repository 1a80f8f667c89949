"""The environment of a node's process."""

import os
import sys
from pathlib import Path

import pytest

from local_runner import environment, spec
from local_runner.environment import Run
from local_runner.nodes import Addresses
from local_runner.spec import JobGroup, TaskSpec
from services.core.errors import ConfigurationError
from services.core.settings import default_run_id


def run_of(*tasks: TaskSpec, gpus=()) -> Run:
    hosts = {task.name: [f"127.1.1.{rank + 2}" for rank in range(task.num_nodes)] for task in tasks}
    return Run(JobGroup("group", tasks), "run-1", Path("/data/volume"), Addresses(hosts, {}), gpus, "mark")


def variables(task: TaskSpec, rank: int = 0, **options) -> dict[str, str]:
    return environment.node_environment(run_of(task, **options), task, rank)


def test_paths_on_the_volume_lead_to_a_directory_of_this_machine():
    given = {"SHARED_DIR": "/shared", "DATASET": "/shared/data.jsonl", "OTHER": "/shared-not", "SLASH": "a/shared"}
    own = variables(TaskSpec("t", "", environment=given, mounts={"/shared": "volume"}))
    assert {name: own[name] for name in given} == {
        "SHARED_DIR": "/data/volume",
        "DATASET": "/data/volume/data.jsonl",
        "OTHER": "/shared-not",
        "SLASH": "a/shared",
    }


def test_a_group_with_several_volumes_is_refused():
    tasks = (TaskSpec("a", "", mounts={"/a": "one"}), TaskSpec("b", "", mounts={"/a": "two"}))
    with pytest.raises(ConfigurationError, match="one volume"):
        environment.check_mounts(JobGroup("group", tasks))


def test_commands_run_with_this_interpreter():
    assert variables(TaskSpec("t", ""))["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_nodes_of_a_task_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 8)
    assert variables(TaskSpec("t", ""))["OMP_NUM_THREADS"] == "8"
    assert variables(TaskSpec("t", "", num_nodes=3))["OMP_NUM_THREADS"] == "2"
    assert variables(TaskSpec("t", "", num_nodes=99))["OMP_NUM_THREADS"] == "1"
    assert variables(TaskSpec("t", "", environment={"OMP_NUM_THREADS": "5"}))["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert variables(TaskSpec("t", ""))["OMP_NUM_THREADS"] == "3"


def test_the_tasks_variables_win_over_this_machines_and_skypilots_over_both(monkeypatch):
    monkeypatch.setenv("MODEL_NAME", "machine")
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "7")
    own = variables(TaskSpec("t", "", num_nodes=2, environment={"MODEL_NAME": "task"}), rank=1)
    assert (own["MODEL_NAME"], own["HF_HOME"], own["SKYPILOT_NODE_RANK"]) == ("task", "/cache", "1")
    assert own["SKYPILOT_NODE_IPS"].split() == ["127.1.1.2", "127.1.1.3"]


def test_gpus_go_to_the_tasks_that_ask_for_them_in_turn():
    rollout = TaskSpec("rollout", "", num_nodes=2, gpus_per_node=1)
    service = TaskSpec("service", "")
    trainer = TaskSpec("trainer", "", num_nodes=1, gpus_per_node=2)

    def given(gpus: tuple[str, ...], task: TaskSpec, rank: int = 0) -> tuple[str, str]:
        own = environment.node_environment(run_of(rollout, service, trainer, gpus=gpus), task, rank)
        return own["CUDA_VISIBLE_DEVICES"], own["SKYPILOT_NUM_GPUS_PER_NODE"]

    four = ("0", "1", "2", "3")
    assert [given(four, rollout), given(four, rollout, 1), given(four, trainer)] == [
        ("0", "1"),
        ("1", "1"),
        ("2,3", "2"),
    ]
    assert given(four, service) == ("", "0")
    assert [given(("0",), rollout, 1), given(("0",), trainer)] == [("0", "1"), ("0", "1")]


def test_a_task_whose_variables_hide_the_gpus_has_none():
    task = TaskSpec("t", "", gpus_per_node=2, environment={"CUDA_VISIBLE_DEVICES": ""})
    own = variables(task, gpus=("0", "1"))
    assert (own["CUDA_VISIBLE_DEVICES"], own["SKYPILOT_NUM_GPUS_PER_NODE"]) == ("", "0")


@pytest.mark.parametrize(
    ("gpus", "nodes", "fits"),
    [((), 2, True), (("0",), 1, True), (("0",), 2, False), (("0", "1"), 2, True), (("3", "5", "7"), 2, True)],
)
def test_nodes_of_the_trainer_have_gpus_of_their_own(gpus, nodes, fits):
    # The rollout nodes may share what is left, in turn.
    rollout = TaskSpec("rollout-server", "", num_nodes=2, gpus_per_node=1)
    run = run_of(rollout, TaskSpec("ppo-trainer", "", num_nodes=nodes, gpus_per_node=1), gpus=gpus)
    if fits:
        environment.check_gpus(run)
    else:
        with pytest.raises(ConfigurationError, match=r"may use 0 here.*--num-nodes ppo-trainer=1"):
            environment.check_gpus(run)


@pytest.mark.parametrize("settings", ["demo.env", "gsm8k.env"])
def test_the_demo_runs_on_a_machine_with_one_gpu(settings):
    root = Path(__file__).parents[2]
    group = spec.load(root / "jobgroup.yaml", spec.Overrides(environment=spec.env_file(root / settings)))
    run = run_of(*group.tasks, gpus=("0",))
    environment.check_gpus(run)
    for task in group.tasks:
        own = environment.node_environment(run, task, 0)
        assert (own["CUDA_VISIBLE_DEVICES"], own["SKYPILOT_NUM_GPUS_PER_NODE"]) == ("", "0"), task.name
        assert own["ROLLOUT_ENGINE"] == "embedded"


def test_a_machine_without_gpus_has_none_per_node():
    assert variables(TaskSpec("t", "", gpus_per_node=4))["SKYPILOT_NUM_GPUS_PER_NODE"] == "0"


@pytest.mark.parametrize(
    ("task_id", "run_id"),
    [
        # <sky-managed-time>_<group>_<task>_<job>-<task number>, as SkyPilot 0.14.1 makes it in jobs/controller.py
        ("sky-managed-2026-01-02-03-04-05-678901_group_data-server_17-0", "group-17"),
        ("sky-managed-2026-01-02-03-04-05-678901_group_ppo-trainer_17-4", "group-17"),
        # after the jobs controller was restarted the time is another
        ("sky-managed-2026-02-03-04-05-06-789012_group_ppo-trainer_17-4", "group-17"),
        ("sky-managed-2026-01-02-03-04-05-678901_group_ppo-trainer_18-4", "group-18"),
        ("sky-managed-2026-01-02-03-04-05-678901_my_3-1_group_task_9-1_18-4", "group-18"),
        ("local", "group"),
    ],
)
def test_all_tasks_of_a_launch_derive_the_same_run_id(monkeypatch, task_id, run_id):
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "group")
    monkeypatch.setenv("SKYPILOT_TASK_ID", task_id)
    assert default_run_id() == run_id
