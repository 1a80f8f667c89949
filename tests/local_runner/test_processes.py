"""A run's processes are found by the mark in their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from local_runner.processes import MARK, end, marked
from tests.waiting import IDLE_SECONDS, wait_until

# The tests' own shell may ignore these signals, as it does for jobs in the background and under nohup.
PARENT = """
import signal, sys
from local_runner.processes import running

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with running([sys.executable, "-c", sys.argv[1]]) as process:
    process.wait()
"""
RUNNER = """
import signal, sys, time
from pathlib import Path

def stop(number, frame):
    Path("asked").touch()
    signal.signal(number, lambda number, frame: sys.exit(Path("told again").touch()))

signal.signal(signal.SIGINT, stop)
Path("started").touch()
time.sleep(60)
time.sleep(60)
"""

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_a_command_stops_its_run_and_a_second_time_at_once(tmp_path: Path, number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, RUNNER], cwd=tmp_path, stderr=subprocess.PIPE) as parent:
        try:
            for file in ("started", "asked"):
                wait_until((tmp_path / file).exists, file)
                parent.send_signal(number)
            parent.wait(IDLE_SECONDS)
        finally:
            parent.kill()
    assert (tmp_path / "told again").exists()
