"""Mistakes on the command line are answered with what to type instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from local_runner import spec
from tests.local_runner.in_process import call

ROOT = Path(__file__).parents[2]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns what ``grpo run`` says to wrong arguments, with single spaces."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str, cwd: Path = ROOT) -> str:
        monkeypatch.chdir(cwd)
        assert call("run", *arguments) in (2, 78)
        return re.sub(r"\s+", " ", capfd.readouterr().err)

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-node", "ppo-trainer=1"], "No such option: --num-node"),
        (["--env", "MAX_STEPS = 0.5"], "MAX_STEPS is '0.5'"),
        (["examples/demo.env"], "give it as --env-file examples/demo.env"),
        (["--env", "MAX_STEPS=1", "MAX_STEPS", "3"], "unexpected extra argument"),
        (["--env-file", "examples/dem.env"], "there is no --env-file examples/dem.env"),
        (["3"], "there is no file 3; this project has"),
        (["3"], "a setting is given as --env NAME=VALUE"),
        (
            ["--num-nodes", "trainer=2"],
            "names trainer; the nearest is ppo-trainer; the tasks of jobgroup.yaml are ppo-trainer, data-server,",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(told: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in told(*arguments)


def test_no_arguments_at_all_stand_for_the_job_group_file_here(told: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "jobgroup.yaml").write_text("name: mine\n")
    assert told(cwd=tmp_path).startswith("error: jobgroup.yaml: ")


def test_the_projects_own_settings_files_are_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec.env_file(Path("examples/demo.env"))["ROLLOUT_ENGINE"] == "embedded"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/demo.env").write_text("MAX_STEPS=1\n")
    assert spec.env_file(Path("examples/demo.env")) == {"MAX_STEPS": "1"}


def test_the_list_of_commands_ends_silently_when_its_reader_has_read_enough() -> None:
    # The pipe has no reader before the program prints.
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-P", ROOT / "scripts/grpo.py"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert done.stderr == ""
