"""Runs that cannot learn: real processes of a whole job group."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.errors import EXIT_CONFIGURATION
from services.run_page.directory import FIRST_FAILURE
from tests.e2e.system import System, one_each

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

RAISES = {"REWARD_FN": "tests.e2e.rewards:always_fails", "BATCH_SIZE": "4", "EVAL_PROMPTS": "0"}
SAID = "tests.e2e.rewards:always_fails: LookupError: nothing like '' is right ("
AGENT = {"AGENT": "tests.e2e.agents:twice", "PROMPT_STYLE": "chat"}


@pytest.mark.parametrize(
    ("job_group", "settings", "first", "said"),
    [
        ("jobgroup.yaml", RAISES, "ppo-trainer-0", SAID),
        ("jobgroups/async.yaml", RAISES, "ppo-trainer-0", SAID),
        ("jobgroups/agent.yaml", RAISES | AGENT, "ppo-trainer-0", SAID),
        ("jobgroup.yaml", {"DATASET": "nobody/no-such-dataset"}, "data-server-0", "nobody/no-such-dataset"),
    ],
    ids=["sync", "collectors", "agent", "data"],
)
def test_what_a_restart_would_not_change_ends_the_run_with_the_reason(
    tiny_model: Path, tmp_path: Path, job_group: str, settings: dict[str, str], first: str, said: str
) -> None:
    nodes = one_each("rollout-server", "ppo-trainer")
    run = System(tmp_path, tiny_model, *nodes, job_group=job_group, **settings)
    assert run.wait() == EXIT_CONFIGURATION, run.text
    told = [line for line in run.text.splitlines() if said in line]
    assert any(line.startswith("  error: ") for line in told), "the reason of the end"
    assert said in run.log(first)
    assert "restarting" not in run.text
    assert len(run.metrics()) < 3
    assert run.processes() == []
    if settings.get("REWARD_FN") == RAISES["REWARD_FN"]:
        # So few steps may be over before the runner looks for the second time; then the error comes first.
        assert told[0].startswith(("an answer failed: reward_error: ", "  error: ")), "it is told before a step's line"
        assert "tests/e2e/rewards.py, line 6, in always_fails)" in told[0]
        assert run.summary()["status"] == "failed"
        assert said in (run.run_dir / FIRST_FAILURE).read_text()
