"""The commands of docs/evaluation.md run, with the tests' own model and servers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evaluation.conftest import ARITHMETIC
from tests.pages import ROOT, blocks
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import LIMIT_SECONDS

BLOCKS = blocks(ROOT / "docs/evaluation.md")
HERE = [block.text.strip() for block in BLOCKS if block.language == "bash" and not block.words]
MODEL, RUN, URL = ".cache/models/smollm2-135m", "runs/my-run", "http://127.0.0.1:30000"


@pytest.fixture(scope="module")
def router(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of servers that run already."""
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), tiny_model)
    try:
        yield nodes.start_all().router.url
    finally:
        nodes.stop()


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE)
def test_its_commands_run(command: str, router: str, tmp_path: Path, tiny_model: Path) -> None:
    for version in ("v000001", "v000002"):
        shutil.copytree(tiny_model, tmp_path / "run/policy" / version)
    for block in BLOCKS:
        if block.language == "python" and block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    program, *arguments = shlex.split(command)
    assert program == "grpo"
    given = {MODEL: str(tiny_model), RUN: str(tmp_path / "run"), URL: router, f"{URL}/v1": f"{router}/v1"}
    # A training run's settings are of its own model: the variables of the tests win over the file's.
    own = [option for name, value in ARITHMETIC.items() for option in ("--env", f"{name}={value}")]
    extra = ["--limit", "4", "--max-new-tokens", "4", "--output", str(tmp_path / "out"), *own]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.grpo", *(given.get(word, word) for word in arguments), *extra],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "JOBGROUP_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out/results.json").read_text())
    for one in results.get("checkpoints", [results]):
        assert one["metrics"]["greedy pass@1"]["prompts"] == 4
        assert one["left_out"] == {}
    assert ("checkpoints" in results) == (RUN in command)
    assert (one["agent"] != {}) == ("agent" in command)
