"""A run's processes are found by the mark in their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from local_runner.processes import MARK, end, marked
from tests.waiting import wait_until

RUN = f"run-{os.getpid()}"
MARKED = os.environ | {MARK: f"{RUN}/data-server-0"}


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
        end([RUN], grace_seconds=30)
    assert process.returncode == -15


def test_the_mark_of_a_node_is_not_that_of_another_whose_name_begins_alike() -> None:
    with subprocess.Popen(["sleep", "60"], env=MARKED) as process:
        node = f"{RUN}/data-server-0"
        assert [bool(marked(prefix)) for prefix in (RUN, node, RUN[:-1], node[:-2])] == [True, True, False, False]
        process.kill()


@pytest.mark.parametrize(("grace_seconds", "hurries"), [(0.2, False), (3600, True)])
def test_what_does_not_end_when_asked_is_killed_after_a_time_or_in_a_hurry(
    tmp_path: Path, grace_seconds: float, hurries: bool
) -> None:
    hurry = threading.Event()
    if hurries:
        hurry.set()
    stubborn = ["bash", "-c", "trap '' TERM; touch started; while :; do sleep 0.1; done"]
    with subprocess.Popen(stubborn, cwd=tmp_path, env=MARKED, start_new_session=True) as process:
        wait_until((tmp_path / "started").exists)
        end([f"{RUN}/data-server-0"], grace_seconds, hurry)
    assert process.returncode == -signal.SIGKILL
