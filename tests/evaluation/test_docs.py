"""The commands of docs/evaluation.md run, with the tests' own model and servers."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from evaluation.settings import EvaluationSettings
from tests.evaluation.conftest import ARITHMETIC
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.skypilot_facts import ROOT, check_command
from tests.waiting import LIMIT_SECONDS

PAGE = (ROOT / "docs" / "evaluation.md").read_text()

FENCES = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
HERE = [line for language, tag, text in FENCES if language == "bash" and not tag for line in text.splitlines()]
ON_A_CLUSTER = [line for language, tag, text in FENCES if tag == "cluster" for line in text.splitlines()]
MODEL = ".cache/models/smollm2-135m"
RUN = "runs/my-run"
URL = "http://127.0.0.1:30000"


@pytest.fixture
def place(tmp_path, tiny_model):
    """A directory with the run and the agent that commands name."""
    shutil.copytree(tiny_model, tmp_path / "run/policy/v000001")
    shutil.copytree(tiny_model, tmp_path / "run/policy/v000002")
    for language, name, text in FENCES:
        if language == "python":
            (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE)
def test_its_commands_run(command, place, tiny_model):
    program, *arguments = shlex.split(command)
    assert program == "grpo"
    nodes = Nodes(place / "nodes", tiny_model)
    nodes.directory.mkdir()
    try:
        router = nodes.start_all().router.url if URL in command else ""
        given = {MODEL: str(tiny_model), RUN: str(place / "run"), URL: router, f"{URL}/v1": f"{router}/v1"}
        # A training run's settings are of its own model: the variables of the tests win over the file's.
        own = [option for name, value in ARITHMETIC.items() for option in ("--env", f"{name}={value}")]
        extra = ["--limit", "4", "--max-new-tokens", "4", "--output", str(place / "out"), *own]
        done = subprocess.run(
            [sys.executable, "-m", "scripts.grpo", *(given.get(word, word) for word in arguments), *extra],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(place), "JOBGROUP_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    finally:
        nodes.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((place / "out/results.json").read_text())
    for one in results.get("checkpoints", [results]):
        assert one["metrics"]["greedy pass@1"]["prompts"] == 4
        assert one["left_out"] == {}
    assert ("checkpoints" in results) == ("runs/" in command.split(" --")[0]) == (place / "out/curve.png").exists()
    assert (one["agent"] != {}) == ("agent" in command)


@pytest.mark.parametrize("command", ON_A_CLUSTER)
def test_commands_for_a_cluster_have_options_that_exist(command):
    if command.startswith("sky "):
        check_command(command)
        return
    program, *words = shlex.split(command)
    assert program == "grpo"
    environment = os.environ | {"COLUMNS": "200"}
    start = [sys.executable, "-m", "scripts.grpo", words[0], "--help"]
    page = subprocess.run(start, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    for word in words[1:]:
        assert not word.startswith("--") or re.search(rf"(^|\s){word}\b", page.stdout), word
        assert not word.endswith(".yaml") or (ROOT / word).exists(), word


def test_the_variables_it_names_are_settings():
    named = set(re.findall(r"\b(EVAL_[A-Z]+(?:_[A-Z]+)*)\b", PAGE))
    assert named
    assert named <= {name.upper() for name in EvaluationSettings.model_fields}


def test_files_it_points_to_exist():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
