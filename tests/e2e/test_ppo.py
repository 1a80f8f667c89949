"""PPO with a critic, whole: a trainer that is killed comes back and learns what the undisturbed one learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.system import System, one_each

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, KILLED_AFTER = 6, 4
SETTINGS = {
    "ADVANTAGE": "gae",
    "CRITIC_WARMUP_STEPS": "1",
    "CRITIC_LEARNING_RATE": "1e-3",
    "GAE_LAMBDA": "0.95",
    "UPDATES_PER_BATCH": "2",
    "MAX_STEPS": str(STEPS),
    "CHECKPOINT_EVERY": "1",
    "EVAL_PROMPTS": "0",
    "PUBLISH_TYPE": "float32",
    "CRITIC": "own",
}


def test_a_killed_trainer_ends_with_the_model_and_the_critic_of_an_undisturbed_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    system = System(tmp_path, tiny_model, *one_each("rollout-server", "ppo-trainer"), **SETTINGS)
    system.wait_for_step(KILLED_AFTER)
    system.kill("ppo-trainer-0")
    assert system.wait() == 0, system.text
    assert "resumed" in system.log("ppo-trainer-0")
    records = system.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all({"value_loss", "explained_variance", "value_clip_fraction"} <= record.keys() for record in records)
    # The weights of the first step's state, trained undisturbed on the recorded groups, are those at the end.
    assert system.verify() == list(range(1, STEPS + 1))
    assert system.processes() == []
