"""Runs that cannot learn, and runs whose disk is full for a while: real processes of a whole job group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.run_page.directory import FIRST_FAILURE
from tests.e2e.system import System

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BATCH = 4
SAID = "tests.e2e.rewards:always_fails: LookupError: nothing like '' is right ("
PLACE = "tests/e2e/rewards.py, line 6, in always_fails)"


@pytest.mark.parametrize(
    ("job_group", "nodes", "settings"),
    [
        ("jobgroup.yaml", {}, {}),
        pytest.param("jobgroup.yaml", {}, {"MODE": "async"}, marks=pytest.mark.slow),
        pytest.param("jobgroups/async.yaml", {"collector": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            "jobgroups/agent.yaml",
            {},
            {"AGENT": "tests.e2e.agents:twice", "PROMPT_STYLE": "chat"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sync", "async", "collectors", "agent"],
)
def test_a_reward_that_always_raises_ends_the_run_with_the_exception(
    tiny_model: Path, tmp_path: Path, job_group: str, nodes: dict[str, int], settings: dict[str, str]
) -> None:
    counts = {"rollout-server": 1, "ppo-trainer": 1} | nodes
    options = [option for task, count in counts.items() for option in ("--num-nodes", f"{task}={count}")]
    fields = {"REWARD_FN": "tests.e2e.rewards:always_fails", "BATCH_SIZE": str(BATCH), "EVAL_PROMPTS": "0"}
    run = System(tmp_path, tiny_model, *options, job_group=job_group, **(fields | settings))
    assert run.wait() == 78, run.text
    told = [line for line in run.text.splitlines() if SAID in line and PLACE in line]
    # So few steps may be over before the runner looks for the second time; then the error comes first.
    assert told[0].startswith(("an answer failed: reward_error: ", "  error: ")), "it is told before any step's line"
    assert run.summary()["status"] == "failed"
    assert f"every answer of {2 * BATCH} prompts" in run.log("ppo-trainer-0") or job_group == "jobgroups/agent.yaml"
    assert any(line.startswith("  error: ") for line in told), "the reason of the end"
    assert SAID in (run.run_dir / FIRST_FAILURE).read_text()
    assert len(run.metrics()) < 3
    assert [line for line in told if line.startswith("step 1/")] or not run.metrics()
    assert run.processes() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory whose ``runs`` is a disk of 64 MiB."""
    disk = tmp_path / "runs"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield tmp_path
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(file: Path) -> None:
    """Take all the room that there is."""
    try:
        with file.open("ab", buffering=0) as stream:
            while stream.write(bytes(1 << 16)):
                pass
    except OSError:
        pass


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_no_step(tiny_model: Path, small_disk: Path) -> None:
    fields = {"BATCH_SIZE": "4", "EVAL_PROMPTS": "0", "CHECKPOINT_EVERY": "1", "MAX_STEPS": "12"}
    nodes = ("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1")
    run = System(small_disk, tiny_model, *nodes, **fields)
    run.wait_for_step(3)
    other = small_disk / "runs" / "of-somebody-else"

    def restarted_twice() -> bool:
        assert run.process.poll() is None, run.text
        fill(other)
        return "ppo-trainer restarting, exit code 33; restart 2" in run.text

    run._wait_until(restarted_twice, "two restarts over the full disk")
    other.unlink()
    assert run.wait() == 0, run.text
    assert [record["step"] for record in run.metrics()] == list(range(1, 13))
