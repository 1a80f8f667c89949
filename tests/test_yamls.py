"""Every file that SkyPilot is to launch loads and validates with its own classes, with --env and --secret."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]
SKYPILOT = Path(os.environ.get("SKYPILOT_PYTHON", ROOT / ".venv-sky/bin/python"))
FILES = [
    str(path.relative_to(ROOT)) for path in sorted([*ROOT.glob("jobgroup*.yaml"), *ROOT.glob("evaluation/*.yaml")])
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SkyPilot makes of the files."""
    if not SKYPILOT.exists():
        pytest.skip(f"no SkyPilot at {SKYPILOT}; `make test` installs it")
    environment = os.environ | {"HOME": str(tmp_path_factory.mktemp("home"))}
    command = [SKYPILOT, ROOT / "tests/skypilot_overrides.py", *FILES]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Unknown fields" not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
