"""`sky jobs launch jobgroup.yaml` by SkyPilot's own server and controller: the queue, and what Kubernetes is asked for.

No pod ever runs, so this ends where SkyPilot would connect to the pods.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any

import orjson
import pytest
import yaml

from local_runner import spec
from scripts.launch.images import with_images
from tests.skypilot.conftest import ROOT, SkyPilot
from tests.skypilot.kubernetes_api import KubernetesApi, Object

pytestmark = [pytest.mark.skypilot, pytest.mark.timeout(900)]

JOBGROUP = ROOT / "jobgroup.yaml"
GIVEN = {"MODEL_NAME": "Qwen/Qwen2.5-1.5B-Instruct", "MAX_STEPS": "7"}
SECRET = "a-token-that-only-its-tasks-may-see"
NODES = {"data-server": 1, "rollout-server": 2, "reward-server": 1, "replay-buffer": 1, "ppo-trainer": 2}
WITH_GPU = {"rollout-server", "ppo-trainer"}
JOB = "1"


@pytest.fixture(scope="module")
def launched(skypilot: SkyPilot, kubernetes: KubernetesApi) -> SkyPilot:
    """The job group, launched by the README's commands, when all pods are asked for."""
    skypilot.sky("volumes", "apply", "--yes", "jobgroups/volume.yaml")
    overrides = [part for name, value in GIVEN.items() for part in ("--env", f"{name}={value}")]
    launch = ["jobs", "launch", "--yes", "--async", "jobgroup.yaml", *overrides]
    skypilot.sky(*launch, "--secret", f"JOBGROUP_TOKEN={SECRET}")
    skypilot.wait_until(lambda: len(kubernetes.pods()) == sum(NODES.values()), "every pod is asked for")
    return skypilot


@pytest.fixture
def pods(launched: SkyPilot, kubernetes: KubernetesApi) -> list[tuple[str, Object]]:
    """Task and pod."""
    return [(task_of(pod), pod) for pod in kubernetes.pods()]


@pytest.fixture
def tasks(launched: SkyPilot) -> dict[str, dict[str, Any]]:
    """What the controller hands to each task once its pods are there, by name."""
    with closing(sqlite3.connect(f"file:{launched.home}/.sky/spot_jobs.db?mode=ro", uri=True)) as database:
        (text,) = database.execute("SELECT dag_yaml_content FROM job_info WHERE spot_job_id = ?", [JOB]).fetchone()
    return {document["name"]: document for document in list(yaml.safe_load_all(text))[1:]}


def task_of(pod: Object) -> str:
    """The task a pod is for, by the name that SkyPilot gives its cluster: task, job, user."""
    name = pod["metadata"]["labels"]["skypilot-cluster-name"]
    found = re.fullmatch(r"(.+?)-\d+-[0-9a-f]+", name)
    assert found, name
    return found[1]


def container(pod: Object) -> Object:
    """What runs in a pod."""
    (only,) = pod["spec"]["containers"]
    return only


def test_the_queue_shows_five_tasks_and_marks_the_primary(launched):
    queue = launched.sky("jobs", "queue")
    rows = re.findall(r"↳\s+\d+\s+([\w-]+)( \[P\])?\s+(\S+)", queue)
    assert {name: bool(primary) for name, primary, _ in rows} == {name: name == "ppo-trainer" for name in NODES}, queue
    requested = {name: wanted for name, _, wanted in rows}
    assert {name: int(wanted.partition("x")[0]) for name, wanted in requested.items()} == NODES, queue
    assert set(re.findall(r"STARTING|PENDING|FAILED\w*|CANCELLED|SUCCEEDED", queue)) <= {"STARTING", "PENDING"}, queue


def test_gpus_are_asked_for_where_they_are_meant_and_hidden_elsewhere(pods):
    for task, pod in pods:
        resources = container(pod)["resources"]
        gpus = resources.get("limits", {}).get("nvidia.com/gpu", 0)
        hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"} in container(pod)["env"]
        assert (int(gpus), hidden) == ((1, False) if task in WITH_GPU else (0, True)), task
        if task in WITH_GPU:
            (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            assert term["matchExpressions"] == [
                {"key": "skypilot.co/accelerator", "operator": "In", "values": ["h100"]}
            ]


def test_cpus_memory_and_images_are_those_of_the_file(pods):
    written = {
        document["name"]: document["resources"] for document in list(yaml.safe_load_all(JOBGROUP.read_text()))[1:]
    }
    for task, pod in pods:
        requests = container(pod)["resources"]["requests"]
        assert float(requests["cpu"]) == float(written[task]["cpus"].rstrip("+")), task
        assert float(str(requests["memory"]).rstrip("G")) == float(written[task]["memory"].rstrip("+")), task
        assert f"docker:{container(pod)['image']}" == written[task]["image_id"]


def test_the_volume_is_one_claim_that_many_may_write_to(pods, kubernetes):
    (claim,) = [one for one in kubernetes.posted if one["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for task, pod in pods:
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        mounts = {mount["mountPath"]: claims.get(mount["name"]) for mount in container(pod)["volumeMounts"]}
        assert mounts.get("/shared") == claim["metadata"]["name"], task


def test_each_task_is_handed_the_environment_of_the_file_and_the_command_line(tasks):
    group = spec.load(JOBGROUP, spec.Overrides(GIVEN, {"JOBGROUP_TOKEN": SECRET}, {}))
    assert tasks.keys() == NODES.keys()
    for task in group.tasks:
        envs = {name: str(value) for name, value in tasks[task.name]["envs"].items()}
        handed = {name: value for name, value in envs.items() if not name.startswith("SKYPILOT_")}
        given = handed | tasks[task.name]["secrets"]
        # The local runner's reading of the same file.
        assert {name: value for name, value in given.items() if value} == {
            name: value for name, value in task.environment.items() if value
        }
        assert GIVEN.items() <= handed.items()
        assert tasks[task.name]["secrets"]["JOBGROUP_TOKEN"] == SECRET
        assert tasks[task.name]["run"].strip() == task.run.strip()


def test_no_secret_is_in_what_kubernetes_is_asked_for(launched, kubernetes):
    assert SECRET.encode() not in orjson.dumps(kubernetes.posted)


def test_nothing_was_asked_that_a_cluster_would_answer_and_this_one_does_not(launched, kubernetes):
    assert kubernetes.unserved == []


def test_a_cancelled_job_leaves_no_pod(launched, kubernetes):
    # The pods are gone after it.
    launched.sky("jobs", "cancel", "--yes", JOB)
    launched.wait_until(lambda: not kubernetes.pods(), "no pod is left")
    launched.wait_until(lambda: "CANCELLED" in launched.sky("jobs", "queue", "--all"), "the job counts as cancelled")


def test_environment_servers_of_images_are_pods_in_which_bubblewrap_works(launched, kubernetes, tmp_path):
    images = {"environment-server": "debian:12", "environment-server-2": "example.org/a:1"}
    file = tmp_path / "jobgroup.yaml"
    file.write_text(with_images((ROOT / "jobgroups/environment.yaml").read_text(), [*images.values()]))
    launched.sky("jobs", "launch", "--yes", "--async", str(file))

    def asked_for() -> dict[str, Object]:
        found = {task_of(pod): pod for pod in kubernetes.pods()}
        return {name: found[name] for name in images} if images.keys() <= found.keys() else {}

    for name, pod in launched.wait_until(asked_for, "the pods of both images are asked for").items():
        assert container(pod)["image"] == images[name]
        assert pod["spec"]["hostUsers"] is False
        profile = {"type": "Unconfined"}
        granted = {"seccompProfile": profile, "appArmorProfile": profile, "procMount": "Unmasked"}
        assert granted.items() <= container(pod)["securityContext"].items()
    launched.sky("jobs", "cancel", "--yes", "--all")
    launched.wait_until(lambda: not kubernetes.pods(), "no pod is left")
