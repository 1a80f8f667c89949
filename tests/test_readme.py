"""README.md is true: its commands are accepted, and its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from local_runner import skypilot
from tests.local_runner.in_process import asks_here
from tests.pages import ROOT, blocks, commands, grpo_command
from tests.rows import write_rows

__all__ = ["asks_here"]

PAGE = ROOT / "README.md"
README = PAGE.read_text()
COMMANDS = commands(PAGE)
RUNS = [command[2:] for command in COMMANDS if command[:2] == ["grpo", "run"]]
LAUNCHES = [command[2:] for command in COMMANDS if command[:2] == ["grpo", "launch"]]


def test_make_knows_its_targets() -> None:
    targets = {*re.findall(r"`make ([\w-]+)", README), *(command[1] for command in COMMANDS if command[0] == "make")}
    assert "demo" in targets
    for target in targets:
        subprocess.run(["make", target, "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", RUNS, ids=shlex.join)
def test_the_runner_accepts_its_jobs(
    arguments: list[str],
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    asks_here: None,
) -> None:
    """In a checkout with the demo's model, in which a reader has data and a reward of their own."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    model = tmp_path / ".cache/models/smollm2-135m"
    model.parent.mkdir(parents=True)
    model.symlink_to(tiny_model)
    (tmp_path / "my").mkdir()
    for name, first in (("questions", 0), ("held-out", 100)):
        rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(first, first + 100)]
        write_rows(tmp_path / f"my/{name}.jsonl", rows)
    (tmp_path / "my_rewards.py").write_text("def close(response): return 0.0\n")
    monkeypatch.chdir(tmp_path)
    grpo_command("run").main([*arguments, "--dry-run"], standalone_mode=False)
    assert "ppo-trainer" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", LAUNCHES, ids=shlex.join)
def test_launches_are_accepted(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without SkyPilot, which takes seconds to ask: tests/scripts/test_launch.py does.
    monkeypatch.setattr(skypilot, "interpreter", lambda: None)
    options = {*arguments, "--dry-run"} - set(arguments)
    grpo_command("launch").main([*arguments, *options, "--output", str(tmp_path)], standalone_mode=False)
    assert (tmp_path / "jobgroup.yaml").exists()
    assert "to launch it: sky volumes apply" in capsys.readouterr().out


def test_its_python_compiles() -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            compile(block.text, "README.md", "exec")
