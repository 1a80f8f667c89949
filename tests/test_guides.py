"""The pages in docs/guides do what they say: the blocks of each are run in order, those for a cluster are not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/guides").glob("*.md"))
FENCE = re.compile(r"^```(\w+)( cluster)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, bool, str]]:
    return [(language, bool(cluster), text) for language, cluster, text in FENCE.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_is_run(page, tiny_model, tmp_path):
    ran = 0
    environment = os.environ | {"MODEL": str(tiny_model), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    for name in ("jobgroup.yaml", "jobgroup-async.yaml", "services", "trainer", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for language, cluster, text in blocks(page):
        if cluster:
            continue
        assert language in ("bash", "python"), language
        command = ["bash", "-euc", text.replace(".venv/bin/python", sys.executable)]
        if language == "python":
            command = [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran, "nothing on this page is run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_needs_a_cluster_is_a_launch_of_the_job_with_known_variables(page):
    known = set(re.findall(r"^\| `([A-Z_0-9]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    for _, cluster, text in blocks(page):
        for command in text.splitlines() if cluster else []:
            assert re.match(r"sky jobs launch jobgroup(-async)?\.yaml ", command), command
            assert set(re.findall(r"--env (\w+)=", command)) <= known, command
