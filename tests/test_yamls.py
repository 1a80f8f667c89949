"""Every file that SkyPilot is to launch loads and validates with its own classes, with --env and --secret."""

from typing import Any

import pytest
import yaml

from local_runner.spec import JOB_GROUPS
from tests.skypilot_facts import FILES, ROOT, skypilot_facts


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """SkyPilot's own reading of the files."""
    return skypilot_facts()["files"]


def test_skypilot_loads_them_with_all_their_tasks_and_what_is_given_at_launch(loaded):
    for file in FILES:
        documents = list(yaml.safe_load_all((ROOT / file).read_text()))
        assert loaded[file]["is_job_group"] == (len(documents) > 1)
        tasks = documents[1:] or documents
        assert list(loaded[file]["tasks"]) == [document["name"] for document in tasks]
        for document in tasks:
            task = loaded[file]["tasks"][document["name"]]
            written = {name: str(value) for name, value in document.get("envs", {}).items()}
            bucket = {"CHECKPOINT_BUCKET": "s3://bucket"} if "CHECKPOINT_BUCKET" in written else {}
            assert task["envs"] == written | {"MODEL_NAME": "given", "NEW": "1"} | bucket
            assert task["secrets"]["JOBGROUP_TOKEN"] == "token"
            assert task["secrets"]["WANDB_API_KEY"] == "key"


def test_the_trainer_is_the_first_task_of_a_job_group(loaded):
    # `sky jobs launch` shows the log of the first task that has not ended; `sky jobs cancel` ends tasks in this order.
    for file in JOB_GROUPS:
        assert next(iter(loaded[file]["tasks"])) == "ppo-trainer"


def test_skypilot_tries_gpus_in_the_order_of_the_file_and_keeps_nodes_at_a_restart(loaded):
    for file in [*JOB_GROUPS, "evaluation/evaluate.yaml"]:
        for name, task in loaded[file]["tasks"].items():
            has_gpu = name in ("rollout-server", "ppo-trainer")
            assert task["is_ordered"] == has_gpu, name
            assert task["accelerators"] == (["H100:1", "H200:1", "A100-80GB:1", "L40S:1"] if has_gpu else []), name
            assert task["recovery"]["strategy"] == "FAILOVER", name


def test_no_managed_job_is_given_a_token_of_the_api_server(loaded):
    # SkyPilot gives every task of a managed job one, unless the task says otherwise.
    for file in FILES:
        for name, task in loaded[file]["tasks"].items():
            assert task["recovery"] is None or not task["has_api_server_access"], name


USES_THE_HUB = {"ppo-trainer", "data-server", "rollout-server", "gateway", "collector", "evaluate"}


def test_only_tasks_that_load_models_or_datasets_of_the_hub_declare_its_token(loaded):
    assert "jobgroup.yaml" in FILES
    for file in FILES:
        documents = list(yaml.safe_load_all((ROOT / file).read_text()))
        declaring = {document["name"] for document in documents if "HF_TOKEN" in document.get("secrets", {})}
        assert declaring == set(loaded[file]["tasks"]) & USES_THE_HUB, file
