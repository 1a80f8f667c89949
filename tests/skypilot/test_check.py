"""``grpo launch --check`` by SkyPilot's own server and controller: two small pods, of which none ever runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.skypilot.conftest import ROOT, SkyPilot, served, why_not
from tests.skypilot.kubernetes_api import KubernetesApi, Object, node, storage_class
from tests.skypilot.test_sizes import gpus_of, task_of
from tests.waiting import LIMIT_SECONDS

pytestmark = [pytest.mark.skypilot, pytest.mark.timeout(1800)]

NODES = [node("cpu-1"), node("l40s-1", "L40S", 8), node("a100-1", "A100-80GB", 8)]
SIZES = ["--model", "Qwen/Qwen3-8B", "--trainer-nodes", "2", "--gpus", "H200:8,A100-80GB:8", "--rollout-gpus", "L40S:2"]


@pytest.fixture(scope="module")
def cluster() -> KubernetesApi:
    return KubernetesApi(NODES, storage_class("nfs"))


@pytest.fixture(scope="module")
def sky(cluster: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyPilot]:
    if reason := why_not():
        pytest.fail(reason, pytrace=False)
    with served(cluster.app) as url, SkyPilot(tmp_path_factory.mktemp("home"), url).serving() as skypilot:
        yield skypilot


@pytest.fixture(scope="module")
def pods(sky: SkyPilot, cluster: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """The pods that a check asks for; its job is cancelled when they are there."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.grpo",
            "launch",
            *SIZES,
            "--check",
            "--yes",
            "--output",
            tmp_path_factory.mktemp("out"),
        ],
        cwd=ROOT,
        env=sky.environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{sky.told()}"
    [job] = re.findall(r"^job (\d+); its log: sky jobs logs \1 check-trainer and ", done.stdout, re.MULTILINE)
    sky.wait_until(lambda: len(cluster.pods()) == 2, "every pod is asked for")
    asked = cluster.pods()
    sky.sky("jobs", "cancel", "--yes", job)
    sky.wait_until(lambda: not cluster.pods(), "no pod is left")
    return asked


def test_each_tier_has_a_pod_with_one_of_its_gpus(pods):
    assert Counter(map(task_of, pods)) == {"check-trainer": 1, "check-rollout": 1}
    assert {task_of(pod): gpus_of(pod) for pod in pods} == {
        "check-trainer": ("a100-80gb", 1),
        "check-rollout": ("l40s", 1),
    }


def test_the_pods_of_both_tasks_have_the_volume_and_the_small_image(pods, cluster):
    [claim] = [one for one in cluster.posted if one["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods:
        [container] = pod["spec"]["containers"]
        assert container["image"] == "python:3.11-bookworm"
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        mounts = {mount["mountPath"]: claims.get(mount["name"]) for mount in container["volumeMounts"]}
        assert mounts["/shared"] == claim["metadata"]["name"]


def test_nothing_was_asked_that_a_cluster_would_answer_and_this_one_does_not(pods, cluster):
    assert cluster.unserved == []
