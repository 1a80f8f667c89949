"""Every file that SkyPilot is to launch loads and validates with its own classes, with --env and --secret."""

from typing import Any

import pytest
import yaml

from tests.skypilot_facts import FILES, ROOT, skypilot_facts


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """SkyPilot's own reading of the files."""
    return skypilot_facts()["files"]


@pytest.mark.parametrize("file", FILES)
def test_skypilot_loads_it_with_all_its_tasks(loaded, file):
    documents = list(yaml.safe_load_all((ROOT / file).read_text()))
    assert loaded[file]["is_job_group"] == (len(documents) > 1)
    tasks = documents[1:] if len(documents) > 1 else documents
    assert list(loaded[file]["tasks"]) == [document["name"] for document in tasks]


@pytest.mark.parametrize("file", FILES)
def test_what_is_given_at_launch_reaches_every_task_and_nothing_else_changes(loaded, file):
    documents = list(yaml.safe_load_all((ROOT / file).read_text()))
    for document in documents[1:] or documents:
        task = loaded[file]["tasks"][document["name"]]
        written = {name: str(value) for name, value in document.get("envs", {}).items()}
        assert task["envs"] == written | {"MODEL_NAME": "given", "NEW": "1"}
        assert task["secrets"]["JOBGROUP_TOKEN"] == "token"
        assert task["secrets"]["WANDB_API_KEY"] == "key"


def test_there_are_files():
    assert "jobgroup.yaml" in FILES
    assert len(FILES) >= 5
