"""The evaluation head and environment servers by SkyPilot's own server, on a cluster without labels of spot nodes."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from tests.skypilot.conftest import NODES, skypilot_on
from tests.skypilot.kubernetes_api import KubernetesApi, Object, storage_class

pytestmark = [pytest.mark.skypilot, pytest.mark.timeout(900)]

TOKEN = "a-token-that-only-commands-may-see"
COMMANDS = {
    "evaluation-head": "evaluation/head.yaml",
    "game-server-1": "evaluation/environment_server.yaml",
}


@pytest.fixture(scope="module")
def cluster() -> KubernetesApi:
    return KubernetesApi(NODES, storage_class("nfs"))


@pytest.fixture(scope="module")
def pods(cluster: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Object]]:
    """The pods that the page's commands ask for, by the name of their cluster."""
    with skypilot_on(cluster, tmp_path_factory.mktemp("home")) as sky:

        def asked_for() -> dict[str, Object]:
            names = {
                pod["metadata"]["labels"]["skypilot-cluster-name"].rsplit("-", 1)[0]: pod for pod in cluster.pods()
            }
            return names if len(names) == len(COMMANDS) + 1 else {}

        given = ("--yes", "--async", "--secret", f"JOBGROUP_TOKEN={TOKEN}")
        for name, file in COMMANDS.items():
            sky.sky("launch", "-c", name, file, *given)
        sky.sky("jobs", "launch", "-n", "game-server-job", COMMANDS["game-server-1"], *given)
        yield sky.wait_until(asked_for, "every pod is asked for")


def requests_of(pod: Object) -> tuple[float, float]:
    """Return the processor cores and the GB of memory that a pod asks for."""
    [container] = pod["spec"]["containers"]
    requests = container["resources"]["requests"]
    return float(requests["cpu"]), float(str(requests["memory"]).rstrip("G"))


def test_environment_servers_run_where_no_node_is_known_to_be_a_spot_machine(pods: dict[str, Object]) -> None:
    servers = [pod for name, pod in pods.items() if name.startswith("game-server")]
    assert len(servers) == 2
    for pod in servers:
        assert requests_of(pod) == (2, 4)
        assert "spot" not in orjson.dumps(pod["spec"].get("nodeSelector", {})).decode()


def test_the_head_runs_without_a_gpu(pods: dict[str, Object]) -> None:
    [container] = pods["evaluation-head"]["spec"]["containers"]
    assert requests_of(pods["evaluation-head"]) == (8, 16)
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


def test_no_secret_is_in_what_kubernetes_is_asked_for(pods: dict[str, Object], cluster: KubernetesApi) -> None:
    assert TOKEN.encode() not in orjson.dumps(cluster.posted)
