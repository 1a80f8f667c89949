"""``grpo doctor``: what this machine can do, and a job group on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_runner import doctor
from services.core.errors import EXIT_CONFIGURATION
from services.sandbox.kernel import landlock_version
from tests.local_runner.in_process import call

ROOT = Path(__file__).parents[2]
UNCONFINED = {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}
Table = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], asks_here: None) -> Table:
    """Returns the exit code, and state and facts of each row by its subject."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        code = call("doctor", *arguments)
        printed = capfd.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed if "│" in line]
        return code, {subject: f"{state}: {facts}" for subject, state, facts in rows}

    return run


def test_it_shows_what_this_machine_can_do(table: Table) -> None:
    code, rows = table()
    assert code == 0
    assert {"system", "memory", "disk", "GPUs", "engine", "sandbox bwrap", "sandbox landlock"} <= set(rows)
    if landlock_version():
        assert rows["sandbox landlock"].startswith("yes: every attack fails; start ")


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
    _, rows = table()
    assert rows["engine"].startswith("yes: ")
    assert rows["the trainer's kernels"].startswith("no: ")
    assert "build-essential" in rows["the trainer's kernels"]
    assert rows["SGLang's kernels"].startswith("no: ")
    assert all(word in rows["SGLang's kernels"] for word in ("build-essential", "-dev", "ninja-build", "CUDA_HOME"))
    monkeypatch.setenv("SGLANG_PYTHON", "any text")
    _, rows = table()
    assert rows["engine"].startswith("no: "), "a text is not an interpreter"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not {"the trainer's kernels", "SGLang's kernels"} & set(table()[1])


def test_a_job_group_that_could_not_run_is_refused_with_all_reasons(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_of_sandboxes", lambda: ())  # the other test tries them
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "q{i}", "answer": "a"}}\n' for i in range(9)))
    settings = {"MODEL_NAME": str(tmp_path), "DATASET": str(tmp_path / "rows.jsonl"), "REWARD_FN": "no_such_module:f"}
    words = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    code, rows = table("--job-group", "jobgroup.yaml", *words)
    assert code == EXIT_CONFIGURATION
    assert rows["job group: settings"].startswith("yes")
    assert "no_such_module" in rows["job group: files, functions, judge and sandbox"]
    assert "landlock" in rows["pod of reward-server"]
    assert rows["pod of data-server"] == "-: python:3.11-bookworm"
    code, rows = table("--job-group", "jobgroup.yaml", "--env", "BATCH_SIZE=none")
    assert code == EXIT_CONFIGURATION
    assert "BATCH_SIZE is 'none'" in rows["job group: settings"]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({}, "landlock, if"),
        ({"runtimeClassName": "gvisor"}, "bwrap, on gVisor's own kernel"),
        ({"hostUsers": False, "containers": [{"securityContext": UNCONFINED}]}, "bwrap if the image has bubblewrap"),
        ({"securityContext": UNCONFINED}, "bwrap if the image has bubblewrap"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "landlock, if"),
    ],
)
def test_what_a_pod_allows_is_read_from_its_specification(pod: dict[str, object], expected: str) -> None:
    assert doctor.sandbox_in_pod(pod).startswith(expected)
