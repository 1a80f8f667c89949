"""PPO with a critic, whole: a trainer that is killed comes back and learns what the undisturbed one learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.system import System

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
    # So that a run that was disturbed can be compared with one that was not.
    "ENGINE_DETERMINISTIC": "true",
}
FILES = ("model/model.safetensors", "critic/model.safetensors")


def start(directory: Path, model: Path, kind: str) -> System:
    directory.mkdir()
    nodes = ("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1")
    # Ids of groups begin with the run's.
    return System(directory, model, *nodes, run_id="ppo", CRITIC=kind, **SETTINGS)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_killed_trainer_ends_with_the_model_and_the_critic_of_the_undisturbed_one(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    undisturbed = start(tmp_path / "undisturbed", tiny_model, kind)
    assert undisturbed.wait() == 0, undisturbed.text
    killed = start(tmp_path / "killed", tiny_model, kind)
    killed.wait_for_step(KILLED_AFTER)
    killed.kill("ppo-trainer-0")
    assert killed.wait() == 0, killed.text
    assert "resumed" in killed.log("ppo-trainer-0")
    for name in FILES:
        assert (killed.run_dir / name).read_bytes() == (undisturbed.run_dir / name).read_bytes(), name
    records = [{p.name: p.read_bytes() for p in (s.run_dir / "groups").iterdir()} for s in (killed, undisturbed)]
    assert sorted(records[0]) == [f"step-{step:06d}" for step in range(1, STEPS + 1)]
    assert records[0] == records[1]
    columns = ("reward_mean", "value_loss", "explained_variance", "value_clip_fraction")
    assert [record["step"] for record in killed.metrics()] == list(range(1, STEPS + 1))
    for ours, theirs in zip(killed.metrics(), undisturbed.metrics(), strict=True):
        assert [ours[column] for column in columns] == [theirs[column] for column in columns]
    assert killed.processes() == []
