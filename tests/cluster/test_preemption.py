"""A node is destroyed in the middle of a step and its task comes back elsewhere; only the shared volume survives."""

from collections import Counter
from pathlib import Path

import orjson
import pytest

from services.replay_buffer.settings import ReplaySettings
from services.replay_buffer.store import Store
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import BATCH, RUN, STEPS, Finished

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PREEMPTED_AFTER = 4


PREEMPTIONS = [
    ("data-server-0",),
    ("rollout-server-0",),
    ("rollout-server-1",),
    ("reward-server-0",),
    ("replay-buffer-0",),
    ("ppo-trainer-0",),
    ("ppo-trainer-1",),
]


@pytest.mark.slow
def test_a_run_survives_the_loss_of_both_trainer_nodes(guarded, tiny_model, tmp_path):
    # It publishes through the volume, the guarded run by broadcast, so both transports train the same model, too.
    assert guarded.outcome.exit_code == 0, guarded.cluster.told()
    assert_same_run(preempt(tiny_model, tmp_path, "ppo-trainer-0", "ppo-trainer-1"), guarded)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", PREEMPTIONS, ids=lambda nodes: nodes[0])
def test_a_run_survives_a_preemption(undisturbed, tiny_model, tmp_path, nodes):
    assert_same_run(preempt(tiny_model, tmp_path, *nodes), undisturbed)


@pytest.mark.slow
def test_a_trainer_that_is_lost_before_its_first_checkpoint_starts_anew(tiny_model, tmp_path):
    run = preempt(tiny_model, tmp_path, "ppo-trainer-0", CHECKPOINT_EVERY="0")
    assert "resumed" not in run.cluster.log("ppo-trainer-0")
    # Not the same run: no checkpoint says what the replay buffer held, so it replays groups of the lost steps too.
    assert_whole_run(run)


def preempt(model: Path, directory: Path, *nodes: str, **settings: str) -> Finished:
    """A run that publishes through the volume and in which nodes of one task are destroyed."""
    with Cluster(directory, model, RUN | settings) as cluster:
        cluster.wait_for_step(PREEMPTED_AFTER)
        if "CHECKPOINT_EVERY" not in settings:
            # It is written beside the training.
            cluster.wait_until(lambda: any(cluster.run_dir.glob("checkpoints/step-*")), "a checkpoint is in place")
        before = cluster.address(nodes[0])
        cluster.destroy(*nodes)
        outcome = cluster.wait()
        assert outcome.restarts == {nodes[0].rpartition("-")[0]: 1}, cluster.told()
        assert cluster.address(nodes[0]) != before
        return Finished(cluster, outcome=outcome)


def assert_same_run(run: Finished, undisturbed: Finished) -> None:
    """Asserts that a run lost nothing, did nothing twice and learnt what the undisturbed one did."""
    assert_whole_run(run)
    rewards = [record["reward_mean"] for record in run.metrics()]
    assert rewards == [record["reward_mean"] for record in undisturbed.metrics()], run.cluster.told()
    assert run.model.read_bytes() == undisturbed.model.read_bytes(), "it learnt something else"


def assert_whole_run(run: Finished) -> None:
    """Asserts that a run came to its end, lost nothing and did nothing twice."""
    told = run.cluster.told()
    assert run.outcome.exit_code == 0, told
    assert run.cluster.summary()["status"] == "succeeded"
    assert [record["step"] for record in run.metrics()] == list(range(1, STEPS + 1))
    assert number_of_groups(run) == STEPS * BATCH, "a group was lost"
    uses = uses_of_prompts(run)
    assert set(uses.values()) == {1}, f"prompts were used twice in an epoch: {uses.most_common(5)}"
    assert len(uses) == STEPS * BATCH, "a prompt was left out"


def uses_of_prompts(run: Finished) -> Counter[str]:
    """How many steps trained on each group; a group's id has its epoch and the prompt's place in it."""
    lines = (run.cluster.run_dir / "samples.jsonl").read_bytes().splitlines()
    samples = [orjson.loads(line) for line in lines]
    return Counter(group for _, group in {(sample["step"], sample["group_id"]) for sample in samples})


def number_of_groups(run: Finished) -> int:
    """How many groups the replay buffer's files hold."""
    store = Store(ReplaySettings(replay_dir=run.cluster.run_dir / "replay"))
    try:
        return len(store.groups)
    finally:
        store.database.close()
