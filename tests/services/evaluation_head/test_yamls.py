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


def test_the_head_has_processors_no_gpu_and_the_api_servers_secrets(tasks: Any) -> None:
    head = tasks["head"]
    assert (head["cpus"], head["accelerators"], head["use_spot"]) == (["8+"], [], [False])
    assert head["ports"] == [str(EVALUATION_HEAD_PORT)]
    assert {"SKYPILOT_API_SERVER_ENDPOINT", "SKYPILOT_SERVICE_ACCOUNT_TOKEN"} <= set(head["secrets"])
    assert head["service"] is None


@pytest.mark.parametrize("name", ["environment_server", "environment_service"])
def test_environment_servers_are_on_the_port_that_the_head_asks_for(tasks: Any, name: str) -> None:
    assert tasks[name]["accelerators"] == []
    assert tasks[name]["ports"] == [str(ENVIRONMENT_PORT)] == [tasks["head"]["envs"]["GAME_SERVER_PORT"]]


def test_environment_servers_are_on_spot_machines_where_there_are_any(tasks: Any) -> None:
    assert tasks["environment_server"]["use_spot"] == [True, False]


def test_skyserve_takes_the_service(tasks: Any) -> None:
    # It refuses a choice between spot machines and others.
    assert tasks["environment_service"]["service"]["errors"] is None
    assert tasks["environment_service"]["use_spot"] == [False]


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_machine_goes_when_nothing_runs_on_it(tasks: Any, name: str) -> None:
    # Kubernetes has no stopped machines.
    assert tasks[name]["autostop"]
    assert all((one["idle_minutes"], one["down"]) == (60, True) for one in tasks[name]["autostop"])


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


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_head_installs_no_cuda_where_there_is_none(name: str) -> None:
    setup = yaml.safe_load(PATHS[name].read_text())["setup"]
    [install] = [line for line in setup.splitlines() if ".[head]" in line]
    assert install.startswith('uv pip install --python "$(command -v python)" --torch-backend auto ')


def test_a_managed_environment_server_is_restarted(tasks: Any) -> None:
    assert tasks["environment_server"]["recovery"]["recover_on_exit_codes"] == [EXIT_RECOVERABLE]
    assert tasks["environment_server"]["recovery"]["max_restarts_on_errors"] >= 1


def test_the_service_has_one_to_five_replicas_and_a_readiness_probe(tasks: Any) -> None:
    service = tasks["environment_service"]["service"]
    assert (service["min_replicas"], service["max_replicas"]) == (1, 5)
    assert service["readiness_path"] == "/health"
    assert service["initial_delay"] >= 300
    assert service["target_qps"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_port_is_open_without_a_token(tasks: Any, name: str) -> None:
    assert tasks[name]["must_be_given"] == ["JOBGROUP_TOKEN"]
    assert tasks[name]["still_to_be_given"] == []


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


def test_the_head_installs_the_skypilot_that_its_discovery_names() -> None:
    setup = yaml.safe_load(PATHS["head"].read_text())["setup"]
    assert "'skypilot==0.14.1'" in setup
    assert "skypilot[kubernetes]==0.14.1" in (ROOT / "pyproject.toml").read_text()
