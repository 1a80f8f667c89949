"""The pod of grpo fetch as SkyPilot's own server asks Kubernetes for it. No pod ever runs."""

from __future__ import annotations

import pytest

from scripts.fetch import LAUNCH_OPTIONS
from tests.skypilot.conftest import SkyPilot
from tests.skypilot.kubernetes_api import KubernetesApi

pytestmark = [pytest.mark.skypilot, pytest.mark.timeout(900)]


def test_the_pod_is_small_and_mounts_the_volume(skypilot: SkyPilot, kubernetes: KubernetesApi) -> None:
    skypilot.sky("volumes", "apply", "--yes", "jobgroups/volume.yaml")
    skypilot.sky("launch", "--async", "--cluster", "fetch-1", *LAUNCH_OPTIONS, "scripts/fetch.yaml")
    skypilot.wait_until(kubernetes.pods, "the pod is asked for")
    (pod,) = kubernetes.pods()
    skypilot.sky("down", "--yes", "fetch-1")
    skypilot.wait_until(lambda: not kubernetes.pods(), "no pod is left")
    (container,) = pod["spec"]["containers"]
    claims = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in one
    }
    mounts = {mount["mountPath"]: claims.get(mount["name"]) for mount in container["volumeMounts"]}
    (claim,) = [one for one in kubernetes.posted if one["kind"] == "PersistentVolumeClaim"]
    assert mounts["/shared"] == claim["metadata"]["name"]
    assert float(container["resources"]["requests"]["cpu"]) <= 2
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
