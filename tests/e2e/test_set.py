"""`grpo set` changes settings of whole jobs that run, synchronous and asynchronous, and a killed one keeps them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.core.errors import EXIT_CONFIGURATION
from tests.e2e.system import ROOT, System
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS
from trainer.config.changes import changes_of

# The limit is for a hang; the runs take about a minute each.
pytestmark = [pytest.mark.e2e, pytest.mark.leaving, pytest.mark.timeout(900)]

SETTINGS = {"MAX_STEPS": "500", "NUM_EPOCHS": "99", "CHECKPOINT_EVERY": "2", "EVAL_PROMPTS": "0"}


def grpo(*words: str | Path, code: int = 0) -> str:
    """Run the command line; return what it printed, or its error."""
    command = [sys.executable, "-m", "scripts.grpo", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def change(system: System, *values: str) -> int:
    """Change settings; return the first step for which they hold."""
    done = re.fullmatch(r".* from step (\d+) on\n", grpo("set", system.run_dir, *values))
    assert done is not None
    return int(done[1])


def rates(system: System) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in system.metrics()}


def kill(system: System) -> None:
    """End all processes of a run at once."""
    processes = system.processes()
    for process in (system.process, *processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, IDLE_SECONDS)
    system.process.wait(IDLE_SECONDS)


def end(system: System) -> None:
    """Stop a run as Ctrl-C does, which leaves a checkpoint of its last step."""
    system.process.send_signal(signal.SIGINT)
    assert system.wait() == 130, system.text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            "BATCH_SIZE=4",
            "BATCH_SIZE cannot change while a run runs: models, optimizers, collectors or services read it",
        ),
        ("DATA_SEED=4", "DATA_SEED is a setting of data-server and evaluate alone, which read it when they start"),
        ("LEARNING_RAT=1", "LEARNING_RAT is read by no component; the nearest is LEARNING_RATE"),
        ("LEARNING_RATE=fast", "LEARNING_RATE is 'fast': Input should be a valid number"),
        ("MAX_STEPS=1", "MAX_STEPS is 1, but step"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(running: System, value: str, reason: str) -> None:
    assert reason in grpo("set", running.run_dir, value, code=EXIT_CONFIGURATION)


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("volume"), tiny_model, "--small", run_id="set", **SETTINGS)
    try:
        system.wait_for_step(1)
        yield system
    finally:
        kill(system)


def test_a_killed_run_that_starts_again_as_before_keeps_its_changes(running: System, tiny_model: Path) -> None:
    first = change(running, "LEARNING_RATE=5e-5", "REPLAY_GROUPS=4")
    assert f"LEARNING_RATE=5e-05 from step {first}" in grpo("status", running.run_dir)
    running.wait_for_step(first + 1)
    kill(running)
    resumed = System(running.run_dir.parents[1], tiny_model, "--small", run_id="set", **SETTINGS)
    resumed.wait_for_step(max(rates(running)) + 1)
    last = change(resumed, "MAX_STEPS=400")
    assert re.search(r"steps +\d+ of 400", grpo("status", resumed.run_dir))
    end(resumed)
    found = rates(resumed)
    assert list(found) == list(range(1, max(found) + 1))
    assert {step for step, rate in found.items() if rate == 5e-5} == set(range(first, max(found) + 1))
    assert [one.step for one in changes_of(resumed.run_dir)] == [first, last]
    assert resumed.log("ppo-trainer-0").count("settings changed") >= 3, "at the set, at the start, and at the other set"
    assert resumed.verify()
    assert "does not run (interrupted)" in grpo("set", resumed.run_dir, "LEARNING_RATE=1", code=EXIT_CONFIGURATION)


def test_an_asynchronous_run_takes_a_change_at_a_step(tiny_model: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"COLLECTOR_IN_PROCESS": "true", "MODE": "async"}
    system = System(tmp_path, tiny_model, "--small", run_id="async", **settings)
    system.wait_for_step(1)
    first = change(system, "LEARNING_RATE=5e-5", "CLIP_HIGH=0.3")
    system.wait_for_step(first)
    end(system)
    assert {step for step, rate in rates(system).items() if rate == 5e-5} == set(range(first, len(rates(system)) + 1))
    assert system.verify()
