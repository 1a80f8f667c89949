"""``grpo doctor``: what this machine can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_runner import doctor
from services.harnesses import PRESETS
from services.sandbox.kernel import landlock_version
from tests.local_runner.in_process import call

Table = Callable[[], dict[str, str]]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Table:
    """Returns state and facts of each row by its subject."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run() -> dict[str, str]:
        assert call("doctor") == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if "│" in line]
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
        return {subject: f"{state}: {facts}" for subject, state, facts in rows}

    return run


def test_it_shows_what_this_machine_can_do(table: Table) -> None:
    rows = table()
    assert {"system", "memory", "disk", "GPUs", "engine", "sandbox bwrap", "sandbox landlock"} <= set(rows)
    assert {f"preset {name}" for name in PRESETS} <= set(rows)
    if landlock_version():
        assert rows["sandbox landlock"].startswith("yes: ")


def test_on_a_machine_with_gpus_it_shows_what_trainer_and_engine_lack_to_compile(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_of_sandboxes", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("services.core.toolchain.USUAL_HOME", tmp_path)
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncase $2 in *sysconfig*) echo {tmp_path}; echo {tmp_path};; esac\n")
    python.chmod(0o755)
    monkeypatch.setenv("SGLANG_PYTHON", str(python))
    rows = table()
    assert rows["engine"].startswith("yes: ")
    assert rows["the trainer's kernels"].startswith("no: ")
    assert "build-essential" in rows["the trainer's kernels"]
    assert rows["SGLang's kernels"].startswith("no: ")
    assert all(word in rows["SGLang's kernels"] for word in ("build-essential", "-dev", "ninja-build", "CUDA_HOME"))
    monkeypatch.setenv("SGLANG_PYTHON", "any text")
    rows = table()
    assert rows["engine"].startswith("no: "), "a text is not an interpreter"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not {"the trainer's kernels", "SGLang's kernels"} & set(table())
