"""The hook that lets a cancelled trainer leave a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from local_runner.spec import JOB_GROUPS
from tests.skypilot_facts import skypilot_facts
from tests.waiting import IDLE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
TRAINER = """
import os, pathlib, signal, sys, time
def end(*_):
    time.sleep(0.3)
    pathlib.Path("checkpoint-" + os.environ.get("RANK", "launcher")).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready-" + os.environ.get("RANK", "launcher")).touch()
time.sleep(600)
"""


def stop(*arguments: str) -> str:
    """Run the hook's program as SkyPilot does: elsewhere, with nothing of the task's environment."""
    command = ["/usr/bin/env", "-i", sys.executable, str(ROOT / "trainer/stop.py"), *arguments]
    return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True, timeout=IDLE_SECONDS).stdout


@pytest.fixture
def start(tmp_path):
    """Start what looks like a trainer of a task, and wait until it handles signals."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__main__.py").write_text(TRAINER)
    started = []

    def process(task_id: str, rank: str | None = None) -> subprocess.Popen[bytes]:
        variables = {"SKYPILOT_TASK_ID": task_id} | ({} if rank is None else {"RANK": rank})
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTHONPATH")}
        started.append(subprocess.Popen([sys.executable, "-m", "trainer"], cwd=tmp_path, env=kept | variables))
        ready = tmp_path / f"ready-{rank or 'launcher'}"
        wait_until(ready.exists, "the trainer handles signals")
        ready.unlink()
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.wait(IDLE_SECONDS)


@pytest.mark.parametrize("ranks", [[None], [None, "0", "1"]], ids=["one rank", "a launcher with ranks"])
def test_rank_0_is_asked_and_waited_for(start, tmp_path, ranks):
    task_id = f"test-{uuid.uuid4()}"
    other = start(f"test-{uuid.uuid4()}")
    processes = [start(task_id, rank) for rank in ranks]
    asked = processes[1] if len(ranks) > 1 else processes[0]
    # Reaped beside the hook, as bash does in a pod.
    hook = subprocess.Popen([sys.executable, str(ROOT / "trainer/stop.py"), task_id], stdout=subprocess.PIPE, text=True)
    assert asked.wait(IDLE_SECONDS) == 143
    said, _ = hook.communicate(timeout=IDLE_SECONDS)
    assert f"asked process {asked.pid} to stop" in said
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [
        f"checkpoint-{ranks[-2] if ranks[1:] else 'launcher'}"
    ]
    assert all(one.poll() is None for one in (other, *processes) if one is not asked)


def test_without_a_trainer_nothing_is_waited_for():
    assert stop(f"test-{uuid.uuid4()}").startswith("trainer: nothing runs")


@pytest.mark.parametrize("file", JOB_GROUPS)
def test_skypilot_runs_it_when_the_trainer_is_cancelled(file):
    hooks = {name: task["hooks"] for name, task in skypilot_facts()["files"][file]["tasks"].items() if task["hooks"]}
    command = "python3 ~/sky_workdir/trainer/stop.py"
    assert hooks == {"ppo-trainer": [{"run": command, "events": ["down"], "timeout": 600}]}
