"""A new start on a node ends the processes of an earlier start, and no others."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.waiting import IDLE_SECONDS, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
START = """
from services.core.processes import kill_stale_processes
kill_stale_processes(grace_seconds={seconds})
print('started')
"""


@contextmanager
def running(
    folder: Path, code: str, *, module: str = "program", task: str = "t-1", rank: str = "0"
) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """Run ``code`` as ``python -m module`` of a task's node within the context; yield its shell and itself."""
    folder = folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    (folder / f"{module}.py").write_text(code)
    environment = os.environ | {
        "SKYPILOT_TASK_ID": task,
        "SKYPILOT_NODE_RANK": rank,
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[3])]),
    }
    # As SkyPilot does: the program's parent is a shell with the same variables.
    process = subprocess.Popen(["bash", "-c", f"{shlex.quote(sys.executable)} -m {module}; exit $?"], env=environment)
    try:
        shell = psutil.Process(process.pid)

        def is_begun() -> bool:
            """Return whether the shell's child is the program, and no longer the shell's copy."""
            with suppress(psutil.NoSuchProcess):
                return any(child.cmdline()[1:] == ["-m", module] for child in shell.children())
            return False

        # One that ends soon may be over before anybody looks.
        wait_until(lambda: is_begun() or process.poll() is not None, "the program runs", every=0.02)
        yield process, next(iter(shell.children()), shell)
    finally:
        for one in psutil.Process(process.pid).children() if process.poll() is None else []:
            one.kill()
        process.wait(IDLE_SECONDS)


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_start_ends_the_processes_of_the_same_task_and_node_alone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, old = stack.enter_context(running(tmp_path, STUBBORN))
        spared = [
            stack.enter_context(running(tmp_path, STUBBORN, rank="1"))[1],
            stack.enter_context(running(tmp_path, STUBBORN, task="t-2"))[1],
            stack.enter_context(running(tmp_path, STUBBORN, module="other"))[1],
        ]
        with running(tmp_path, START.format(seconds=0.2)) as (shell, _):
            assert shell.wait(IDLE_SECONDS) == 0
        wait_until(lambda: has_ended(old), "the old process has ended")
        assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in spared)


def test_a_stale_process_that_ends_by_itself_is_not_killed(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    ended = folder / "ended"
    leaving = f"import time; time.sleep(1); open({str(ended)!r}, 'w').close()"
    with running(tmp_path, leaving), running(tmp_path, START.format(seconds=IDLE_SECONDS)) as (shell, _):
        assert shell.wait(IDLE_SECONDS) == 0
        assert ended.exists()
