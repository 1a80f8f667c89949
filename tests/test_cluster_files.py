"""The files of docs/cluster say what SkyPilot, Kubernetes and Prometheus accept, and fit the job group."""

import os
import re
import shlex
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from local_runner.spec import JOB_GROUPS, load
from services.core import endpoints
from tests.prometheus_targets import ADDRESS, labels, targets
from tests.skypilot_facts import ROOT
from tests.waiting import LIMIT_SECONDS

FOLDER = ROOT / "docs/cluster"
JOB, USER = "17", "fcd1e5cf"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def kinds(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file by their kind."""
    return {document["kind"]: document for document in documents(name)}


@pytest.mark.slow
def test_the_removal_of_old_runs_keeps_the_others(tmp_path):
    for name, days in {"old": 31, "new": 1}.items():
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        for path in (run / "metrics.jsonl", run):
            path.touch()
            os.utime(path, (time.time() - days * 86400,) * 2)
    [task] = documents("clean.yaml")
    command = task["run"].replace("/shared", str(tmp_path)).replace("python -m", f"{shlex.quote(sys.executable)} -m")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["new"]


def test_the_queue_the_namespace_and_skypilots_settings_name_each_other():
    queue, names = kinds("queue.yaml"), kinds("namespace.yaml")
    [settings] = documents("team.yaml")
    namespace = names["Namespace"]["metadata"]["name"]
    assert settings["kubernetes"]["namespace"] == namespace == names["NetworkPolicy"]["metadata"]["namespace"]
    local = queue["LocalQueue"]
    assert settings["kubernetes"]["kueue"]["local_queue_name"] == local["metadata"]["name"]
    assert local["metadata"]["namespace"] == namespace
    assert local["spec"]["clusterQueue"] == queue["ClusterQueue"]["metadata"]["name"]
    allowed = queue["ClusterQueue"]["spec"]["namespaceSelector"]["matchLabels"]
    assert allowed == {"kubernetes.io/metadata.name": namespace}


def pods() -> list[dict[str, Any]]:
    """A pod as SkyPilot names it for each node of every task, and for a cluster of the evaluation."""
    files = [ROOT / name for name in JOB_GROUPS]
    tasks = {task.name: task.num_nodes for file in files for task in load(file).tasks} | {"gateway": 2}
    names = [
        f"{task}-{JOB}-{USER}-{'head' if rank == 0 else f'worker{rank}'}"
        for task, num_nodes in tasks.items()
        for rank in range(num_nodes)
    ]
    names += [f"{cluster}-{USER}-head" for cluster in ("evaluation-head", "game-server-1", "sky-jobs-controller")]
    return [{"metadata": {"name": name, "labels": {"parent": "skypilot", "skypilot-user": "ada"}}} for name in names]


def test_prometheus_scrapes_each_component_once_at_its_port():
    found = {
        job: {
            (re.split(rf"(?:-{JOB})?-{USER}", name)[0], int(address.removeprefix(f"{ADDRESS}:")))
            for name, address in its
        }
        for job, its in targets(pods()).items()
    }
    ports = {task.value: its[0] for task, its in endpoints.PORTS.items() if its}
    assert found == {
        "grpo": {
            (task, ports[task]) for task in ("ppo-trainer", "data-server", "reward-server", "replay-buffer", "gateway")
        },
        "grpo-router": {("rollout-server", endpoints.ROUTER_METRICS_PORT)},
        "grpo-engines": {("rollout-server", endpoints.ROUTER_PORT)},
        "evaluation-head": {("evaluation-head", endpoints.EVALUATION_HEAD_PORT)},
        "environment-server": {(name, endpoints.ENVIRONMENT_PORT) for name in ("environment-server", "game-server-1")},
    }


def test_every_target_of_a_job_has_its_run_and_namespace():
    found = labels(pods())
    assert {one["run"] for job in ("grpo", "grpo-router", "grpo-engines") for one in found[job]} == {JOB}
    assert {one["namespace"] for its in found.values() for one in its} == {"default"}
    assert not any("run" in one for one in found["evaluation-head"])


def test_rules_name_scrape_jobs_that_there_are():
    configuration = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    [rules] = configuration["rule_files"]
    found = re.findall(r'job=~?"([\w|-]+)"', (ROOT / "docs" / rules).read_text())
    named = {name for names in found for name in names.split("|")}
    assert "grpo" in named
    assert named <= {job["job_name"] for job in configuration["scrape_configs"]}


def test_the_images_pulled_ahead_are_those_of_the_nodes_with_gpus():
    pod = kinds("prepull.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    pulled = {one["name"]: one["image"] for one in pod["initContainers"]}
    _, *tasks = yaml.safe_load_all((ROOT / "jobgroup.yaml").read_text())
    wanted = {task["name"]: task["resources"]["image_id"] for task in tasks if "accelerators" in task["resources"]}
    assert {name: f"docker:{image}" for name, image in pulled.items()} == wanted
    assert all("nvidia.com/gpu" not in str(one["resources"]) for one in [*pod["initContainers"], *pod["containers"]])
