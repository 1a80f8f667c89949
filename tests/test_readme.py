"""README.md is true: its commands run, its variables and files exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from services.data_server.settings import DataSettings
from services.replay_buffer.settings import ReplaySettings
from services.reward_server.settings import RewardSettings
from services.rollout_server.settings import RolloutSettings
from tests.skypilot_facts import check_command
from trainer.config import TrainerSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

FENCES = re.findall(r"^```(\w+)?( cluster)?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
HERE = [line for language, cluster, text in FENCES if language == "bash" and not cluster for line in text.splitlines()]
ON_A_CLUSTER = [line for language, cluster, text in FENCES if cluster for line in text.splitlines()]
MAKE = [command for command in HERE if command.startswith("make ")]
RUNNER = [command for command in HERE if "scripts.run_local" in command]


def test_every_command_is_of_a_kind_that_is_tried():
    assert sorted(HERE) == sorted(MAKE + RUNNER)
    assert all(re.match(r"sky |pip install ", command) for command in ON_A_CLUSTER)


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_its_targets(command):
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", RUNNER)
def test_the_runner_takes_its_options(command):
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/python"
    done = subprocess.run([sys.executable, *arguments, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ppo-trainer-0" in done.stdout


def test_skypilot_takes_its_options():
    for command in ON_A_CLUSTER:
        if command.startswith("sky "):
            check_command(command)


def test_the_variables_in_its_table_are_settings():
    classes = (TrainerSettings, DataSettings, RewardSettings, ReplaySettings, RolloutSettings)
    known = {name.upper() for settings in classes for name in settings.model_fields} | {"HF_TOKEN", "WANDB_API_KEY"}
    rows = re.findall(r"^\| (`[A-Z_`, ]+) \|", README, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"[A-Z_]{3,}", row)}
    assert len(named) > 10
    assert named <= known


def test_files_it_points_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_its_python_compiles():
    for language, _, text in FENCES:
        if language == "python":
            compile(text, "README.md", "exec")
