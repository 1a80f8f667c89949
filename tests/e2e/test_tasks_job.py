"""A run over Harbor tasks of two images, played by a program in their boxes: killed, it ends with equal rewards."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.launch.images import with_images
from tests.e2e.system import System, one_each
from tests.skypilot_facts import ROOT
from tests.tasks import pass_checks, write_task

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap"),
]

STEPS = 4
IMAGES = ("debian:12", "python:3.12-slim")
DIGITS = """#!/bin/sh
echo "{\\"reward\\": 0.0$(tr -dc 0-9 < /app/said.txt), \\"asked\\": 1}" > /logs/verifier/reward.json
"""
"""The reward has the answer's digits."""


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Any:
    """``run(name)``: starts a run over four tasks, whose two images have environment-servers of their own."""
    for number in range(4):
        image = f"FROM {IMAGES[number % 2]}\nWORKDIR /app\n"
        files = {"instruction.md": f"{number}+{number}=\n", "tests/test.sh": DIGITS, "environment/Dockerfile": image}
        write_task(tmp_path / f"tasks/{number}", files)
    pass_checks(tmp_path / "tasks")
    group = (ROOT / "jobgroups/environment.yaml").read_text()
    (tmp_path / "jobgroup.yaml").write_text(with_images(group, IMAGES))

    def start(name: str) -> System:
        return System(
            tmp_path,
            tiny_model,
            *one_each("ppo-trainer", "rollout-server"),
            run_id=name,
            job_group=str(tmp_path / "jobgroup.yaml"),
            ROLLOUT="program",
            AGENT_COMMAND="python tests/e2e/box_agent.py",
            ENVIRONMENT="sandbox",
            SANDBOX="bwrap",
            CODE_CPU_SECONDS="30",
            ENVIRONMENT_STEP_SECONDS="600",
            DATASET=f"harbor:{tmp_path}/tasks",
            DATASET_CONFIG="",
            BATCH_SIZE="2",
            GROUP_SIZE="4",
            MAX_STEPS=str(STEPS),
            AGENT_MAX_TOKENS="8",
            REPLAY_GROUPS="0",
            EVAL_PROMPTS="0",
            CHECKPOINT_EVERY="1",
        )

    return start


def test_rewards_are_those_of_a_run_that_was_not_killed(run: Any) -> None:
    killed = run("killed")
    killed.wait_until(lambda: any(killed.run_dir.glob("checkpoints/step-*")), "a checkpoint")
    killed.kill("ppo-trainer-0")
    assert killed.wait() == 0, killed.text
    assert re.search(r"resumed .*?step=\d+", killed.log("ppo-trainer-0"))
    whole = run("whole")
    assert whole.wait() == 0, whole.text
    rewards = [[record["reward_mean"] for record in system.metrics()] for system in (killed, whole)]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == STEPS
    assert len({*rewards[0]}) > 1, "rewards that could differ"
    for sample in whole.samples():
        digits = "".join(filter(str.isdecimal, sample["completion"]))
        assert sample["reward"] == pytest.approx(float(f"0.0{digits}"))
    last = whole.metrics()[-1]
    assert last["episode_tokens_engines"] == last["episode_tokens_traces"] + sum(
        tokens for name, tokens in last.items() if name.startswith("episode_tokens_lost_")
    )
