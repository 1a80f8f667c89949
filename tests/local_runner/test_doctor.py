"""``grpo doctor``: what this machine can do, and a job group on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from local_runner.doctor import sandbox_in_pod
from services.core.errors import EXIT_CONFIGURATION
from services.sandbox.kernel import landlock_version
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
UNCONFINED = {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}


def doctor(*arguments: str) -> tuple[int, dict[str, str]]:
    """Return the exit code, and state and facts of each row by its subject."""
    command = [sys.executable, "-m", "scripts.grpo", "doctor", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"COLUMNS": "1000", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert rows, done.stderr
    return done.returncode, {subject: f"{state}: {facts}" for subject, state, facts in rows}


def test_it_shows_what_this_machine_can_do() -> None:
    code, rows = doctor()
    assert code == 0
    assert {"system", "memory", "disk", "GPUs", "engine", "sandbox bwrap", "sandbox landlock"} <= set(rows)
    if landlock_version():
        assert rows["sandbox landlock"].startswith("yes: every attack fails; start ")
    if sys.platform == "linux":
        assert rows["sandbox seatbelt"] == "no: seatbelt is not for linux"


def test_a_job_group_that_could_not_run_is_refused_with_all_reasons(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 9)
    settings = {"MODEL_NAME": str(tmp_path), "DATASET": str(tmp_path / "rows.jsonl"), "REWARD_FN": "no_such_module:f"}
    words = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    code, rows = doctor("--job-group", "jobgroup.yaml", *words)
    assert code == EXIT_CONFIGURATION
    assert rows["job group: settings"].startswith("yes")
    assert "no_such_module" in rows["job group: files, functions, judge and sandbox"]
    assert "landlock" in rows["pod of reward-server"]
    assert rows["pod of data-server"] == "-: python:3.11-bookworm"
    code, rows = doctor("--job-group", "jobgroup.yaml", "--env", "BATCH_SIZE=none")
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
    assert sandbox_in_pod(pod).startswith(expected)
