"""The default names of runs under SkyPilot."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from services.core.run_ids import default_run_id
from services.core.settings import Settings

# <sky-managed-time>_<group>_<task>_<job>-<task number>, as SkyPilot 0.14.1 makes it in jobs/controller.py
EARLY, LATE = "2026-01-02-03-04-05-678901", "2026-02-03-04-05-06-789012"
FIRST, SECOND = "group-17-20260102-030405", "group-17-20260203-040506"


def run_id(monkeypatch: pytest.MonkeyPatch, shared: Path, when: str, task: str = "group_data-server_17-0") -> str:
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "group")
    monkeypatch.setenv("SKYPILOT_TASK_ID", f"sky-managed-{when}_{task}")
    return default_run_id(shared)


def begin(shared: Path, name: str, *, quiet: float = 0.0, **summary: str) -> None:
    """A run of a former controller, which was written to so long ago."""
    run = shared / "runs" / name
    run.mkdir(parents=True)
    written = (time.time() - quiet, time.time() - quiet)
    for file in (run / "metrics.jsonl", *([run / "summary.json"] if summary else [])):
        file.write_text(json.dumps(summary))
        os.utime(file, written)
    os.utime(run, written)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("group_data-server_17-0", FIRST),
        ("group_ppo-trainer_17-4", FIRST),
        ("group_ppo-trainer_18-4", "group-18-20260102-030405"),
        ("my_3-1_group_task_9-1_18-4", "group-18-20260102-030405"),
    ],
)
def test_all_tasks_of_a_launch_derive_the_same_name(monkeypatch, tmp_path, task, expected):
    assert run_id(monkeypatch, tmp_path, EARLY, task) == expected


def test_elsewhere_a_run_has_the_name_of_the_group(monkeypatch, tmp_path):
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "group")
    monkeypatch.setenv("SKYPILOT_TASK_ID", "local")
    assert default_run_id(tmp_path) == "group"
    monkeypatch.delenv("SKYPILOT_JOBGROUP_NAME")
    assert default_run_id(tmp_path) == "local"


def test_the_volume_of_the_settings_is_looked_at(monkeypatch, tmp_path):
    begin(tmp_path, FIRST)
    assert run_id(monkeypatch, tmp_path, LATE) == FIRST
    monkeypatch.delenv("RUN_ID", raising=False)
    assert Settings.load(shared_dir=tmp_path).run_id == FIRST
    assert Settings.load(shared_dir=tmp_path / "other").run_id == SECOND


@pytest.mark.parametrize(
    ("former", "expected"),
    [
        ({}, FIRST),  # the controller was restarted
        ({"status": "failed"}, FIRST),
        ({"status": "succeeded", "job": f"17 of {LATE}"}, FIRST),  # this very job
        ({"status": "succeeded", "job": f"17 of {EARLY}"}, SECOND),  # a job of a controller that is gone
        ({"status": "interrupted", "job": f"17 of {EARLY}"}, SECOND),
    ],
)
def test_only_a_run_that_has_not_ended_keeps_its_name_after_a_restart_of_the_controller(
    monkeypatch, tmp_path, former, expected
):
    begin(tmp_path, FIRST, **former)
    assert run_id(monkeypatch, tmp_path, LATE) == expected
    assert run_id(monkeypatch, tmp_path, EARLY) == FIRST


def test_runs_of_other_jobs_and_groups_do_not_lend_their_names(monkeypatch, tmp_path):
    for name in ("group-1", "group-17", "group-17-mine", "group-170-20260102-030405", "group-2-17-20260102-030405"):
        begin(tmp_path, name)
    assert run_id(monkeypatch, tmp_path, LATE) == SECOND
