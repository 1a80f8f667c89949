"""Addresses of nodes on one machine."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from local_runner import checks, nodes, spec
from local_runner.nodes import Addresses, LocalRun
from local_runner.spec import JobGroup, TaskSpec
from services.core import endpoints
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.machine import visible_gpus

ROOT = Path(__file__).parents[2]
GROUP = JobGroup(
    "group",
    (TaskSpec(Task.ROLLOUT_SERVER, "", num_nodes=2), TaskSpec(Task.TRAINER, "", num_nodes=2), TaskSpec("other", "")),
)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")


def listen(address: str) -> socket.socket:
    host, port = address.split(":")
    server = socket.socket()
    server.bind((host, int(port)))
    server.listen()
    return server


@pytest.mark.parametrize("own_hosts", [pytest.param(True, marks=needs_linux), False])
def test_every_port_of_every_node_can_be_listened_on_at_once(own_hosts):
    with nodes.allocate(GROUP, own_hosts=own_hosts) as addresses:
        assert len(addresses.endpoints) == sum(2 * len(endpoints.PORTS[task.name]) for task in GROUP.tasks[:2])
        servers = [listen(address) for address in addresses.endpoints.values()]
        for server in servers:
            server.close()


@needs_linux
def test_a_node_has_a_host_of_its_own_and_its_usual_ports():
    with nodes.allocate(GROUP) as addresses:
        hosts = [host for task in addresses.hosts.values() for host in task]
        assert len(set(hosts)) == 5
        assert all(host.startswith("127.") and host != "127.0.0.1" for host in hosts)
        assert addresses.find("rollout-server", 1, 30001) == f"{addresses.hosts['rollout-server'][1]}:30001"


@needs_linux
def test_two_runs_at_once_share_no_address():
    with nodes.allocate(GROUP) as one, nodes.allocate(GROUP) as other:
        assert not set(one.endpoints.values()) & set(other.endpoints.values())


@needs_linux
def test_a_port_that_is_taken_on_all_addresses_is_replaced(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setitem(endpoints.PORTS, Task.TRAINER, (port,))  # other programs may have the usual one
        with nodes.allocate(GROUP) as addresses:
            server = listen(addresses.find("ppo-trainer", 0, port))
            assert server.getsockname()[1] != port
            server.close()


def test_components_find_each_other_by_the_variable_of_addresses(monkeypatch):
    with nodes.allocate(GROUP, own_hosts=False) as addresses:
        monkeypatch.setenv("JOBGROUP_ENDPOINTS", addresses.variable)
        monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
        assert json.loads(addresses.variable) == addresses.endpoints
        assert (
            endpoints.endpoint(endpoints.Task.ROLLOUT_SERVER).url
            == f"http://{addresses.find('rollout-server', 0, 30000)}"
        )
        bound = endpoints.bind_address(Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT)
        assert f"{bound.host}:{bound.port}" == addresses.find("rollout-server", 1, 30001)


def run_of(*tasks: TaskSpec, gpus=()) -> LocalRun:
    hosts = {task.name: [f"127.1.1.{rank + 2}" for rank in range(task.num_nodes)] for task in tasks}
    return LocalRun(JobGroup("group", tasks), "run-1", Path("/data/volume"), Addresses(hosts, {}), gpus, "mark")


def variables(task: TaskSpec, rank: int = 0, **options) -> dict[str, str]:
    return nodes.node_environment(run_of(task, **options), task, rank)


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
        nodes.check_mounts(JobGroup("group", tasks))


def test_commands_run_with_this_interpreter():
    assert variables(TaskSpec("t", ""))["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


@pytest.mark.parametrize(("platform", "policy"), [("linux", "passive"), ("darwin", None)])
def test_on_linux_threads_that_wait_sleep_unless_the_user_says_otherwise(platform, policy, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert variables(TaskSpec("t", "")).get("OMP_WAIT_POLICY") == policy
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert variables(TaskSpec("t", ""))["OMP_WAIT_POLICY"] == "active"


def test_nodes_of_a_task_share_the_cores_and_ray_gives_each_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(nodes.machine, "cores", lambda: 8)

    def given(task: TaskSpec) -> tuple[str, str]:
        return variables(task)["SKYPILOT_POD_CPU_CORE_LIMIT"], variables(task)["OMP_NUM_THREADS"]

    assert given(TaskSpec("t", "")) == ("8", "1")
    assert given(TaskSpec("t", "", num_nodes=3)) == ("2", "1")
    assert given(TaskSpec("t", "", num_nodes=99)) == ("1", "1")
    assert given(TaskSpec("t", "", environment={"OMP_NUM_THREADS": "5"})) == ("5", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert given(TaskSpec("t", "")) == ("3", "3")


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
        own = nodes.node_environment(run_of(rollout, service, trainer, gpus=gpus), task, rank)
        return own["CUDA_VISIBLE_DEVICES"], own["SKYPILOT_NUM_GPUS_PER_NODE"]

    four = ("0", "1", "2", "3")
    assert [given(four, rollout), given(four, rollout, 1), given(four, trainer)] == [
        ("0", "1"),
        ("1", "1"),
        ("2,3", "2"),
    ]
    assert given(four, service) == ("", "0")
    assert [given(("0",), rollout, 1), given(("0",), trainer)] == [("0", "1"), ("0", "1")]


def test_an_exported_choice_of_gpus_is_shared_out_among_the_nodes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    rollout = TaskSpec("rollout-server", "", num_nodes=1, gpus_per_node=1)
    trainer = TaskSpec("ppo-trainer", "", num_nodes=2, gpus_per_node=1)
    run = run_of(rollout, trainer, gpus=visible_gpus())
    ranks = [(rollout, 0), (trainer, 0), (trainer, 1)]
    given = [nodes.node_environment(run, task, rank)["CUDA_VISIBLE_DEVICES"] for task, rank in ranks]
    assert given == ["4", "5", "6"]


@pytest.mark.parametrize(("gpus", "environment"), [(("0", "1"), {"CUDA_VISIBLE_DEVICES": ""}), ((), {})])
def test_a_task_whose_variables_hide_the_gpus_or_a_machine_without_them_has_none(gpus, environment, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    task = TaskSpec("t", "", gpus_per_node=2, environment=environment)
    own = variables(task, gpus=gpus)
    assert (own.get("CUDA_VISIBLE_DEVICES", ""), own["SKYPILOT_NUM_GPUS_PER_NODE"]) == ("", "0")


@pytest.mark.parametrize(
    ("gpus", "count", "fits"),
    [((), 2, True), (("0",), 1, True), (("0",), 2, False), (("0", "1"), 2, True), (("3", "5", "7"), 2, True)],
)
def test_nodes_of_the_trainer_have_gpus_of_their_own(gpus, count, fits):
    # The rollout nodes may share what is left, in turn.
    rollout = TaskSpec("rollout-server", "", num_nodes=2, gpus_per_node=1)
    run = run_of(rollout, TaskSpec("ppo-trainer", "", num_nodes=count, gpus_per_node=1), gpus=gpus)
    if fits:
        nodes.check_gpus(run)
    else:
        with pytest.raises(ConfigurationError, match=r"may use 0 here.*--num-nodes ppo-trainer=1"):
            nodes.check_gpus(run)


def load(file: str, environment: dict[str, str] | None = None, **overrides) -> JobGroup:
    """Return a job group of this project."""
    return spec.load(ROOT / file, spec.Overrides(environment=environment or {}, **overrides))


@pytest.mark.parametrize("settings", ["examples/demo.env", "examples/gsm8k.env"])
def test_the_demo_runs_on_a_machine_with_one_gpu(settings):
    group = load("jobgroup.yaml", spec.env_file(ROOT / settings))
    run = run_of(*group.tasks, gpus=("0",))
    nodes.check_gpus(run)
    for task in group.tasks:
        own = nodes.node_environment(run, task, 0)
        assert (own["CUDA_VISIBLE_DEVICES"], own["SKYPILOT_NUM_GPUS_PER_NODE"]) == ("", "0"), task.name
        assert own["ROLLOUT_ENGINE"] == "embedded"


@pytest.mark.parametrize(("gpus", "trainers", "engines"), [(("0",), "0", "0"), (("2", "5"), "2", "5")])
def test_engine_and_trainer_share_a_gpu_only_where_there_is_one(gpus, trainers, engines):
    group = load("jobgroup.yaml", spec.env_file(ROOT / "examples/one-gpu.env"), other_nodes=1)
    run = run_of(*group.tasks, gpus=gpus)
    nodes.check_gpus(run)
    given = {task.name: ",".join(nodes.gpus_of(run, task, 0)) for task in group.tasks}
    assert (given.pop("ppo-trainer"), given.pop("rollout-server")) == (trainers, engines)
    assert set(given.values()) == {""}


def test_engines_and_trainer_share_all_gpus_of_a_machine_and_find_each_other():
    group = load("jobgroups/colocated.yaml", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    run = run_of(*group.tasks, gpus=("0", "1", "2", "3"))
    nodes.check_gpus(run)
    own = nodes.node_environment(run, group.tasks[0], 0)
    assert (own["CUDA_VISIBLE_DEVICES"], own["SKYPILOT_NUM_GPUS_PER_NODE"]) == ("0,1,2,3", "4")
    with nodes.allocate(group) as addresses:
        assert not [key for key in addresses.endpoints if key.startswith("rollout-server")]
        with mock.patch.dict(os.environ, {endpoints.ENDPOINTS_VARIABLE: addresses.variable, "COLOCATE": "true"}):
            assert endpoints.endpoint(Task.ROLLOUT_SERVER).url == f"http://{addresses.find('ppo-trainer', 0, 30000)}"


COLOCATED, AGENT = "jobgroups/colocated.yaml", {"AGENT": "mine:solve", "ROLLOUT": "agent"}


def test_engines_and_trainer_that_share_gpus_need_settings_that_fit():
    for file, variables, named in (
        ("jobgroup.yaml", {"ENGINE_SLEEPS": "false", "PUBLISH_TRANSPORT": "local"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ("jobgroup.yaml", {"COLOCATE": "true", "ENGINE_SLEEPS": "true"}, "COLOCATE is true"),
        (COLOCATED, {"COLOCATE": "false"}, "COLOCATE is false"),
        (COLOCATED, {"ENGINE_SLEEPS": "false"}, "ENGINE_SLEEPS"),
        (COLOCATED, {"MODE": "async"}, "MODE"),
        (COLOCATED, {"LORA_RANK": "8"}, "PUBLISH_TRANSPORT"),
        (COLOCATED, {}, None),
    ):
        group = load(file, variables, other_nodes=1)
        run = run_of(*group.tasks, gpus=("0", "1"))
        with nullcontext() if named is None else pytest.raises(ConfigurationError, match=named):
            loaded = checks.load_all(run)
            checks.check_shared_gpus(run, loaded)
            checks.check_together(loaded, group)


def test_a_gateway_that_looks_for_engines_elsewhere_is_refused():
    colocated = load(COLOCATED, {"ENGINE_SLEEPS": "true", "PUBLISH_TRANSPORT": "disk"} | AGENT)
    [gateway] = [task for task in load("jobgroups/agent.yaml", AGENT).tasks if task.name == "gateway"]
    for variables, refusal in ({}, "but not for gateway"), ({"COLOCATE": "true"}, None):
        task = replace(gateway, environment={**gateway.environment, **variables})
        group = replace(colocated, tasks=(*colocated.tasks, task))
        loaded = checks.load_all(run_of(*group.tasks))
        with nullcontext() if refusal is None else pytest.raises(ConfigurationError, match=refusal):
            checks.check_together(loaded, group)


def test_the_nodes_of_one_machine_keep_its_cache_of_models(monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "/cache/of/this/machine")
    given = TaskSpec("t", "", environment={"HF_HUB_CACHE": "/shared/huggingface"}, mounts={"/shared": "v"})
    assert variables(given)["HF_HUB_CACHE"] == "/cache/of/this/machine"
    chosen = TaskSpec("t", "", environment={"HF_HUB_CACHE": "/another"}, mounts={"/shared": "v"})
    assert variables(chosen)["HF_HUB_CACHE"] == "/another"


@pytest.mark.parametrize(
    ("gpus", "apart"), [((), False), (("0",), False), (("0", "1"), True), (("0", "1", "2"), True)], ids=str
)
def test_the_trainer_learns_whether_engines_have_gpus_of_their_own(gpus: tuple[str, ...], apart: bool) -> None:
    tasks = (TaskSpec(Task.ROLLOUT_SERVER, "", gpus_per_node=1), TaskSpec(Task.TRAINER, "", gpus_per_node=1))
    run = run_of(*tasks, gpus=gpus)
    assert nodes.tiers_have_own_gpus(run) is apart
    with mock.patch.dict(os.environ, nodes.node_environment(run, tasks[1], 0)):
        assert endpoints.tiers_are_apart() is apart


def test_a_node_answers_where_its_health_is_and_other_ranks_of_the_trainer_nowhere():
    ports = {"ppo-trainer": 8004, "rollout-server": 30000, "reward-server": 8002}
    listed = {f"{task}-{rank}:{port}": f"h:{rank}" for task, port in ports.items() for rank in (0, 1)}
    listed["rollout-server-1:30001"] = "engine:1"
    found = {node: nodes.health_address(listed, node) for node in listed_nodes(ports)}
    assert found == {
        "ppo-trainer-0": "h:0",
        "ppo-trainer-1": None,
        "rollout-server-0": "h:0",
        "rollout-server-1": "engine:1",
        "reward-server-0": "h:0",
        "reward-server-1": "h:1",
    }


def listed_nodes(tasks):
    return [f"{task}-{rank}" for task in tasks for rank in (0, 1)]
