"""The YAMLs of evaluation/: SkyPilot accepts them, and they name settings that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from services.core.endpoints import ENVIRONMENT_PORT, EVALUATION_HEAD_PORT
from services.core.errors import EXIT_RECOVERABLE
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.settings import HeadSettings
from tests.skypilot_facts import ROOT, skypilot_facts

NAMES = ("head", "head_bucket", "environment_server", "environment_service")
PATHS = {name: ROOT / f"evaluation/{name}.yaml" for name in NAMES}


@pytest.fixture(scope="module")
def tasks() -> dict[str, Any]:
    """Each file as SkyPilot reads it, by name."""
    files = skypilot_facts()["files"]
    return {name: next(iter(files[f"evaluation/{name}.yaml"]["tasks"].values())) for name in NAMES}


def test_each_task_has_its_machine_its_port_and_its_token(tasks: Any) -> None:
    head, server, service = tasks["head"], tasks["environment_server"], tasks["environment_service"]
    assert (head["cpus"], head["accelerators"], head["use_spot"]) == (["8+"], [], [False])
    assert head["ports"] == [str(EVALUATION_HEAD_PORT)]
    assert {"SKYPILOT_API_SERVER_ENDPOINT", "SKYPILOT_SERVICE_ACCOUNT_TOKEN"} <= set(head["secrets"])
    assert head["service"] is None
    for task in (server, service):
        assert task["accelerators"] == []
        assert task["ports"] == [str(ENVIRONMENT_PORT)] == [head["envs"]["GAME_SERVER_PORT"]]
    for task in tasks.values():
        assert (task["must_be_given"], task["still_to_be_given"]) == (["JOBGROUP_TOKEN"], [])
    # SkyServe refuses a choice between spot machines and others.
    assert (server["use_spot"], service["use_spot"], service["service"]["errors"]) == ([True, False], [False], None)
    for name in NAMES[:3]:
        # Kubernetes has no stopped machines.
        assert tasks[name]["autostop"]
        assert all((one["idle_minutes"], one["down"]) == (60, True) for one in tasks[name]["autostop"])
    assert server["recovery"]["recover_on_exit_codes"] == [EXIT_RECOVERABLE]
    assert server["recovery"]["max_restarts_on_errors"] >= 1
    probed = service["service"]
    assert (probed["min_replicas"], probed["max_replicas"], probed["readiness_path"]) == (1, 5, "/health")
    assert probed["initial_delay"] >= 300
    assert probed["target_qps"] > 0


def test_the_head_with_a_bucket_is_the_head_with_other_policies(tasks: Any) -> None:
    head, with_bucket = (yaml.safe_load(PATHS[name].read_text()) for name in NAMES[:2])
    assert tasks["head_bucket"]["buckets"] == {"/checkpoints": "s3://bucket"}
    assert with_bucket.pop("file_mounts") == {"/checkpoints": {"source": "${CHECKPOINT_BUCKET}", "mode": "MOUNT"}}
    assert with_bucket["envs"].pop("CHECKPOINT_BUCKET") is None
    assert with_bucket["envs"].pop("HEAD_POLICIES") == "cartpole=/checkpoints/cartpole"
    del head["envs"]["HEAD_POLICIES"]
    *lines, example = head["setup"].splitlines()
    assert "toys.cartpole" in example
    assert with_bucket["setup"].splitlines() == lines
    assert {**with_bucket, "setup": ""} == {**head, "setup": ""}


@pytest.mark.parametrize("name", NAMES)
def test_each_yaml_sets_existing_settings_and_starts_its_service(name: str) -> None:
    document = yaml.safe_load(PATHS[name].read_text())
    settings, module = (
        (HeadSettings, "evaluation_head") if "head" in name else (EnvironmentSettings, "environment_server")
    )
    known = {field.upper() for field in settings.model_fields} | {"CHECKPOINT_BUCKET"}
    assert set(document["envs"]) | set(document["secrets"]) <= known
    values = {key.lower(): value for key, value in document["envs"].items() if value}
    settings.load(**values)
    assert document["run"] == f"set -euo pipefail\nexec python -m services.{module}\n"
    assert document["setup"].startswith("set -euo pipefail\n")
    assert not [value for value in document["secrets"].values() if value]
    assert re.fullmatch(r"docker:[^:]+:[^:]*\d[^:]*", document["resources"]["image_id"])


def test_the_service_is_the_server_with_a_service_section() -> None:
    server, service = (yaml.safe_load(PATHS[name].read_text()) for name in NAMES[2:])
    del service["service"]
    # Only managed jobs, clusters and pushing servers use these.
    del server["resources"]["job_recovery"], server["resources"]["autostop"], server["resources"]["ordered"]
    del server["api_server_access"], server["envs"]["EVAL_HEAD_ENDPOINT"]
    assert server == service
