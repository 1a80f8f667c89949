"""The files of docs/cluster and the commands of docs/guides/kubernetes.md, by SkyPilot's own server and controller.

The cluster has no storage class with ReadWriteMany. No pod ever runs.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.skypilot.conftest import NODES, ROOT, SkyPilot, skypilot_on
from tests.skypilot.kubernetes_api import KubernetesApi, Object, selected, storage_class

pytestmark = [pytest.mark.skypilot, pytest.mark.timeout(1800)]

PODS = 7
REFUSAL = (
    'failed to provision volume with StorageClass "gp3": rpc error: code = InvalidArgument desc = Volume capabilities '
    "MULTI_NODE_MULTI_WRITER not supported. Only AccessModes[ReadWriteOnce] supported."
)
"""The event of Amazon's driver for disks."""
NOT_READY = "Volume grpo-shared is not ready"
PAGE = (ROOT / "docs/guides/kubernetes.md").read_text()


@pytest.fixture(scope="module")
def cluster() -> KubernetesApi:
    return KubernetesApi(NODES, storage_class("gp3"))


@pytest.fixture(scope="module")
def sky(cluster: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyPilot]:
    with skypilot_on(cluster, tmp_path_factory.mktemp("home")) as skypilot:
        yield skypilot


@pytest.fixture(scope="module")
def launch(cluster: KubernetesApi, sky: SkyPilot) -> Callable[..., list[Object]]:
    """Launches the job group with a settings file, and returns its pods; the job is cancelled when they are there."""

    def launch(settings: str) -> list[Object]:
        sky.sky("jobs", "launch", "--yes", "--async", "jobgroup.yaml", "--config", settings)
        sky.wait_until(lambda: len(cluster.pods()) == PODS, "every pod is asked for")
        pods = cluster.pods()
        sky.sky("jobs", "cancel", "--yes", "--all")
        sky.wait_until(lambda: not cluster.pods(), "no pod is left")
        return pods

    return launch


@pytest.fixture(scope="module")
def told_without_read_write_many(cluster: KubernetesApi, sky: SkyPilot) -> str:
    """Return the answers of `sky volumes ls` and `sky jobs launch` for volume.yaml; delete the volume afterwards."""
    sky.sky("volumes", "apply", "--yes", "jobgroups/volume.yaml")
    [claim] = [one for path, one in cluster.objects.items() if "/persistentvolumeclaims/" in path]
    claim["status"] = {"phase": "Pending"}
    name, when = claim["metadata"]["name"], claim["metadata"]["creationTimestamp"]
    cluster.objects[f"/api/v1/namespaces/default/events/{name}"] = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": when},
        "type": "Warning",
        "reason": "ProvisioningFailed",
        "message": REFUSAL,
        "involvedObject": {"kind": "PersistentVolumeClaim", "name": name, "namespace": "default"},
        "firstTimestamp": when,
        "lastTimestamp": when,
    }
    shown = sky.sky("volumes", "ls", "grpo-shared", "--refresh")
    with pytest.raises(AssertionError) as refused:
        sky.sky("jobs", "launch", "--yes", "--async", "jobgroup.yaml")
    sky.sky("volumes", "delete", "--yes", "grpo-shared")
    return f"{shown}{refused.value}"


@pytest.fixture(scope="module")
def on_one_machine(told_without_read_write_many: str, sky: SkyPilot, launch: Callable[..., Any]) -> list[Object]:
    """The pods with a machine's directory in place of the volume."""
    sky.sky("volumes", "apply", "--yes", "docs/cluster/one-machine-volume.yaml")
    pods = launch("docs/cluster/one-machine.yaml")
    sky.sky("volumes", "delete", "--yes", "grpo-shared")
    return list(pods)


@pytest.fixture(scope="module")
def of_a_team(on_one_machine: list[Object], sky: SkyPilot, launch: Callable[..., Any]) -> list[Object]:
    """The pods with a team's namespace and queue."""
    sky.sky("volumes", "apply", "--yes", "jobgroups/volume.yaml", "--config", "docs/cluster/team.yaml")
    return list(launch("docs/cluster/team.yaml"))


def settings(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docs/cluster" / name).read_text())["kubernetes"])


def test_the_page_knows_how_skypilot_refuses_a_volume_without_read_write_many(told_without_read_write_many):
    for words in ("NOT_READY", "ProvisioningFailed", NOT_READY):
        assert words in told_without_read_write_many
        assert f"`{words}`" in PAGE


def test_every_pod_is_on_the_machine_with_its_directory(on_one_machine):
    assert len(on_one_machine) == PODS
    wanted = settings("one-machine.yaml")["pod_config"]["spec"]["nodeSelector"]
    directory = yaml.safe_load((ROOT / "docs/cluster/one-machine-volume.yaml").read_text())["config"]["host_path"]
    for pod in on_one_machine:
        assert pod["spec"]["nodeSelector"] == wanted
        host_paths = {one["name"]: one["hostPath"]["path"] for one in pod["spec"]["volumes"] if "hostPath" in one}
        [container] = pod["spec"]["containers"]
        mounted = {mount["mountPath"]: host_paths.get(mount["name"]) for mount in container["volumeMounts"]}
        assert mounted.get("/shared") == directory


def test_the_pods_of_a_team_are_in_its_namespace_and_queue(of_a_team):
    wanted = settings("team.yaml")
    for pod in of_a_team:
        assert pod["metadata"]["namespace"] == wanted["namespace"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == wanted["kueue"]["local_queue_name"]


def test_the_command_for_the_run_page_finds_the_trainers_first_pod(on_one_machine):
    found = re.search(r"kubectl get pods -l (\S+) -o name \| (grep \S+)\)", PAGE)
    names = "".join(f"pod/{pod['metadata']['name']}\n" for pod in on_one_machine if selected(pod, found[1]))
    [job] = {re.search(r"-(\d+)-[0-9a-f]+-", name)[1] for name in names.splitlines()}
    command = found[2].replace("JOB_ID", job).split()
    [name] = subprocess.run(command, input=names, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(rf"pod/ppo-trainer-{job}-[0-9a-f]+-head", name)
