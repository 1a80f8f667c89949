"""A run that cannot learn: real processes of a whole job group."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.errors import EXIT_CONFIGURATION
from services.run_page.directory import FIRST_FAILURE
from tests.e2e.system import System, one_each

# The limit is for a hang; the run takes about half a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SAID = "tests.e2e.rewards:always_fails: LookupError: nothing like '' is right ("


def test_a_reward_that_always_raises_ends_the_run_with_the_reason_and_no_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A collector meets the error, and the trainer ends the run."""
    nodes = one_each("collector", "rollout-server", "ppo-trainer")
    settings = {"REWARD_FN": "tests.e2e.rewards:always_fails", "BATCH_SIZE": "4", "EVAL_PROMPTS": "0"}
    run = System(tmp_path, tiny_model, *nodes, job_group="jobgroups/async.yaml", **settings)
    assert run.wait() == EXIT_CONFIGURATION, run.text
    told = [line for line in run.text.splitlines() if SAID in line]
    assert any(line.startswith("  error: ") for line in told), "the reason of the end"
    assert SAID in run.log("ppo-trainer-0")
    assert "restarting" not in run.text
    assert len(run.metrics()) < 3
    assert run.processes() == []
    # So few steps may be over before the runner looks for the second time; then the error comes first.
    assert told[0].startswith(("an answer failed: reward_error: ", "  error: ")), "it is told before a step's line"
    assert "tests/e2e/rewards.py, line 6, in always_fails)" in told[0]
    assert run.summary()["status"] == "failed"
    assert SAID in (run.run_dir / FIRST_FAILURE).read_text()
