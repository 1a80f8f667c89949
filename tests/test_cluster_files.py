"""The files of docs/cluster say what SkyPilot, Kubernetes and Prometheus accept, and fit the job group."""

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from local_runner.spec import JOB_GROUPS, load
from services.core import endpoints
from tests.prometheus_targets import ADDRESS, labels, targets
from tests.skypilot_facts import ROOT, SKYPILOT, skypilot_facts
from tests.waiting import LIMIT_SECONDS

FOLDER = ROOT / "docs/cluster"
SETTINGS = ["one-machine.yaml", "team.yaml"]
KUBERNETES = {"Namespace": "V1Namespace", "NetworkPolicy": "V1NetworkPolicy", "DaemonSet": "V1DaemonSet"}
JOB, USER = "17", "fcd1e5cf"
ASK = """
import json, os, re, sys, yaml
import sky
from kubernetes import client
from sky import skypilot_config
from sky.volumes.volume import Volume

def unknown(given, kind):
    if given is None:
        return [kind]
    if inner := re.fullmatch(r"list\\[(.*)\\]", kind):
        return [key for one in given for key in unknown(one, inner[1])]
    model = getattr(client, kind, None)
    if model is None:
        return []
    kinds = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    return [key for key in given if key not in kinds] + [
        found for key, value in given.items() if key in kinds for found in unknown(value, kinds[key])
    ]

files = json.loads(sys.argv[1])
task = sky.Task.from_yaml(files["task"])
task.validate()
volume = Volume.from_yaml_config(yaml.safe_load(open(files["volume"])))
print(json.dumps({
    "settings": [dict(skypilot_config.parse_and_validate_config_file(file)) for file in files["settings"]],
    "volume": [volume.name, volume.type, volume.config],
    "task": [task.name, task.volumes, [str(one.cpus) for one in task.resources]],
    "unknown": [found for kind, given in files["objects"] for found in unknown(given, kind)],
}, default=str))
"""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def kinds(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file by their kind."""
    return {document["kind"]: document for document in documents(name)}


def uncommented(name: str) -> dict[str, Any]:
    """The settings of a file with those that its comments offer."""
    return yaml.safe_load(re.sub(r"^( *)# (\w+: \{.*\})$", r"\1\2", (FOLDER / name).read_text(), flags=re.MULTILINE))


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """SkyPilot's and the Kubernetes client's reading of the files."""
    if not SKYPILOT.exists():
        pytest.skip(f"no SkyPilot at {SKYPILOT}; `make test` installs it")
    home = tmp_path_factory.mktemp("home")
    commented, settings = home / "uncommented.yaml", uncommented("team.yaml")
    commented.write_text(yaml.safe_dump(settings))
    files = {
        "settings": [*(str(FOLDER / name) for name in SETTINGS), str(commented)],
        "volume": str(FOLDER / "one-machine-volume.yaml"),
        "task": str(FOLDER / "clean.yaml"),
        "objects": [("V1Pod", settings["kubernetes"]["pod_config"])]
        + [(KUBERNETES[one["kind"]], one) for name in ("namespace.yaml", "prepull.yaml") for one in documents(name)],
    }
    done = subprocess.run(
        [SKYPILOT, "-c", ASK, json.dumps(files)],
        cwd=ROOT,
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_skypilot_accepts_the_settings(answer):
    assert answer["settings"][:-1] == [documents(name)[0] for name in SETTINGS]


@pytest.mark.slow
def test_skypilot_accepts_the_settings_that_are_comments(answer):
    assert answer["settings"][-1] == uncommented("team.yaml")
    assert answer["settings"][-1]["jobs"]["controller"]["resources"].keys() == {"image_id"}


@pytest.mark.slow
def test_the_machines_directory_takes_the_place_of_the_volume(answer):
    [written] = documents("one-machine-volume.yaml")
    assert answer["volume"] == [skypilot_facts()["volume"]["name"], "k8s-hostpath", written["config"]]


@pytest.mark.slow
def test_skypilot_accepts_the_removal_of_old_runs(answer):
    assert answer["task"] == ["clean", {"/shared": "grpo-shared"}, ["1+"]]


@pytest.mark.slow
def test_the_removal_of_old_runs_keeps_the_others(tmp_path):
    for name, days in {"old": 31, "new": 1}.items():
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        for path in (run / "metrics.jsonl", run):
            path.touch()
            os.utime(path, (time.time() - days * 86400,) * 2)
    [task] = documents("clean.yaml")
    command = task["run"].replace("/shared", str(tmp_path)).replace("exec python", f"exec {sys.executable}")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["new"]


@pytest.mark.slow
def test_kubernetes_knows_every_field_of_its_objects(answer):
    assert answer["unknown"] == []


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


def test_prometheus_scrapes_the_first_node_of_a_task_alone_but_every_gateway():
    scraped = [name for job in ("grpo", "grpo-engines") for name, _ in targets(pods())[job]]
    assert sorted(name for name in scraped if name.startswith(("rollout-server", "ppo-trainer", "gateway"))) == [
        f"gateway-{JOB}-{USER}-head",
        f"gateway-{JOB}-{USER}-worker1",
        f"ppo-trainer-{JOB}-{USER}-head",
        f"rollout-server-{JOB}-{USER}-head",
    ]


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
