"""Launches on a cluster without H100s by SkyPilot's own server: the order of the GPUs, and ``grpo launch``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from scripts.launch import job_group_text
from tests.skypilot.conftest import ROOT, SkyPilot, skypilot_on
from tests.skypilot.kubernetes_api import KubernetesApi, Object, node, storage_class
from tests.waiting import LIMIT_SECONDS

pytestmark = [pytest.mark.skypilot, pytest.mark.timeout(1800)]

# L40S comes first in the list of nodes, and has more room.
NODES = [
    node("cpu-1"),
    *(node(f"l40s-{number}", "L40S", 8) for number in range(6)),
    *(node(f"a100-{number}", "A100-80GB", 8) for number in range(4)),
]
SIZES = ["--rollout-nodes", "3", "--trainer-nodes", "1", "--gpus", "H200:8,A100-80GB:8", "--rollout-gpus", "L40S:2"]
LAUNCHED = {"data-server": 1, "rollout-server": 3, "reward-server": 1, "replay-buffer": 1, "ppo-trainer": 1}
SECRET = "a-token-that-only-its-tasks-may-see"


@pytest.fixture(scope="module")
def cluster() -> KubernetesApi:
    return KubernetesApi(NODES, storage_class("nfs"))


@pytest.fixture(scope="module")
def sky(cluster: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyPilot]:
    with skypilot_on(cluster, tmp_path_factory.mktemp("home")) as skypilot:
        yield skypilot


@pytest.fixture(scope="module")
def launched(
    sky: SkyPilot, cluster: KubernetesApi, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Object]]:
    """The files of ``grpo launch``, and the pods that its job asks for; the job is cancelled when they are there."""
    out = tmp_path_factory.mktemp("out")
    options = ["--model", "Qwen/Qwen3-8B", *SIZES, "--output", out, "--secret", "JOBGROUP_TOKEN", "--yes"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.grpo", "launch", *options],
        cwd=ROOT,
        env=sky.environment | {"JOBGROUP_TOKEN": SECRET, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{sky.told()}"
    [job] = re.findall(r"^job (\d+); its log: sky jobs logs \1 ppo-trainer", done.stdout, re.MULTILINE)
    sky.wait_until(lambda: len(cluster.pods()) == sum(LAUNCHED.values()), "every pod is asked for")
    pods = cluster.pods()
    sky.sky("jobs", "cancel", "--yes", job)
    sky.wait_until(lambda: not cluster.pods(), "no pod is left")
    return out, pods


def task_of(pod: Object) -> str:
    return re.sub(r"-\d+-[0-9a-f]+$", "", pod["metadata"]["labels"]["skypilot-cluster-name"])


def gpus_of(pod: Object) -> tuple[str, int] | None:
    """Return the card and the number of GPUs that a pod asks for."""
    [container] = pod["spec"]["containers"]
    count = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
    if not count:
        return None
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = required["nodeSelectorTerms"]
    [expression] = term["matchExpressions"]
    [card] = expression["values"]
    return card, count


def test_the_pods_have_the_sizes_that_were_given_and_derived(launched):
    out, pods = launched
    assert Counter(map(task_of, pods)) == LAUNCHED
    wanted = {"rollout-server": ("l40s", 2), "ppo-trainer": ("a100-80gb", 8)}
    assert {task_of(pod): gpus_of(pod) for pod in pods if gpus_of(pod)} == wanted
    values = job_group_text.values((out / "jobgroup.yaml").read_text())
    for pod in pods:
        [container] = pod["spec"]["containers"]
        memory = str(container["resources"]["requests"]["memory"]).rstrip("G")
        assert float(memory) == float(values[task_of(pod), "resources.memory"].rstrip("+"))


def test_no_secret_is_in_the_files_or_in_what_kubernetes_is_asked_for(launched, cluster):
    out, _ = launched
    assert SECRET.encode() not in orjson.dumps(cluster.posted)
    assert all(SECRET not in file.read_text() for file in out.iterdir())


def test_the_first_gpu_of_the_list_that_the_cluster_has_is_taken(launched, sky, cluster):
    # H100 and H200 come first in jobgroup.yaml, then A100-80GB. L40S comes last, although it is the cheapest.
    sky.sky("jobs", "launch", "--yes", "--async", "jobgroup.yaml")
    sky.wait_until(lambda: len(cluster.pods()) == 7, "every pod is asked for")
    assert {gpus_of(pod) for pod in cluster.pods()} == {None, ("a100-80gb", 1)}
    sky.sky("jobs", "cancel", "--all", "--yes")
    sky.wait_until(lambda: not cluster.pods(), "no pod is left")
