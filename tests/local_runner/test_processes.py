"""A run's processes are found by the mark in their environment."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from local_runner.processes import MARK, end, marked

MARKED = os.environ | {MARK: "run/data-server-0"}


def test_a_process_that_has_no_environment_in_the_middle_of_an_exec_is_asked_to_end_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ, asked = psutil.Process.environ, set()

    def empty_at_first(process: psutil.Process) -> dict[str, str]:
        is_first = process.pid not in asked
        asked.add(process.pid)
        return {} if is_first else environ(process)

    monkeypatch.setattr(psutil.Process, "environ", empty_at_first)
    with subprocess.Popen(["sleep", "60"], env=MARKED, start_new_session=True) as process:
        end(["run"], grace_seconds=30)
    assert process.returncode == -15


def test_the_mark_of_a_node_is_not_that_of_another_whose_name_begins_alike() -> None:
    with subprocess.Popen(["sleep", "60"], env=MARKED) as process:
        found = {prefix: bool(marked(prefix)) for prefix in ("run", "run/data-server-0", "ru", "run/data-server")}
        assert found == {"run": True, "run/data-server-0": True, "ru": False, "run/data-server": False}
        process.kill()
