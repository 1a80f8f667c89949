"""`sky jobs launch` uploads every tracked file, and no run, environment, cache or history."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.skypilot_facts import ROOT, SKYPILOT
from tests.waiting import LIMIT_SECONDS

pytestmark = pytest.mark.slow

HIDDEN = [
    ".git/config",
    ".env",
    ".venv/bin/python",
    ".venv-sky/bin/python",
    ".cache/models/weights",
    ".coverage",
    "runs/first/metrics.jsonl",
    "shared-volume/runs/first/metrics.jsonl",
    "services/__pycache__/app.pyc",
    "skypilot_grpo.egg-info/PKG-INFO",
]
SENT = [".skyignore", "jobgroup.yaml", "my/questions.jsonl", "my/runs/kept.txt", "services/app.py"]
ASK = """
import json, sys, zipfile
from sky.data import storage_utils
from sky.utils import command_runner
folder, archive, root = sys.argv[1:]
storage_utils.zip_files_and_folders([folder], archive)
print(json.dumps({
    "zipped": [name for name in zipfile.ZipFile(archive).namelist() if not name.endswith("/")],
    "filter": command_runner.RSYNC_FILTER_SKYIGNORE,
    "excluded": storage_utils.get_excluded_files(root),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in [*HIDDEN, *SENT]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    shutil.copy(ROOT / ".skyignore", folder)
    return folder


@pytest.fixture(scope="module")
def answer(folder, tmp_path_factory):
    """SkyPilot's own archive of the folder, its filter for rsync, and what it leaves out of this checkout."""
    if not SKYPILOT.exists():
        pytest.skip(f"no SkyPilot at {SKYPILOT}; `make test` installs it")
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        [SKYPILOT, "-c", ASK, folder, home / "upload.zip", ROOT],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_api_server_is_sent_the_code_alone(answer, folder):
    assert sorted(Path("/", name).relative_to(folder) for name in answer["zipped"]) == sorted(map(Path, SENT))


def test_a_pod_is_sent_the_code_alone(answer, folder, tmp_path):
    if shutil.which("rsync") is None:
        pytest.skip("no rsync")
    subprocess.run(f"rsync -a {answer['filter']} {folder}/ {tmp_path}/", shell=True, check=True)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        map(Path, SENT)
    )


def test_no_tracked_file_is_left_out(answer):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    excluded = {Path(name) for name in answer["excluded"]}
    assert Path(".git") in excluded
    tracked = [Path(name) for name in listed.stdout.splitlines()]
    assert [path for path in tracked if {path, *path.parents} & excluded] == []
