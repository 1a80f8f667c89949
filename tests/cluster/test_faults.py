"""Nodes are destroyed, links cut and clocks wrong: the run goes on and trains what an undisturbed one trains.

Of a node that is destroyed only the shared volume survives, and its task comes back elsewhere.
"""

import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from services.replay_buffer.settings import ReplaySettings
from services.replay_buffer.store import Store
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import BATCH, RUN, STEPS

# The limit is for a hang; a run takes some minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

HOUR = 3600
CLOCK = {"PYTHONPATH": str(Path(__file__).with_name("clock")), "CLOCK_JUMP_FILE": "/shared/clock-jump"}
LINK_SECONDS = 10.0
PREEMPTED = [
    ("data-server-0",),
    ("rollout-server-1",),
    ("reward-server-0",),
    ("replay-buffer-0",),
    ("ppo-trainer-0", "ppo-trainer-1"),
]


def task_of(node: str) -> str:
    return node.rpartition("-")[0]


@pytest.fixture(scope="module")
def disturbed(tiny_model, tmp_path_factory):
    """A run through the volume to which all of it happens, and its nodes' addresses before they were destroyed."""
    with Cluster(tmp_path_factory.mktemp("disturbed"), tiny_model, RUN | CLOCK) as cluster:
        cluster.wait_for_step(1)
        cluster.cut("rollout-server-0")
        time.sleep(LINK_SECONDS)
        cluster.mend("rollout-server-0")
        (cluster.volume / "clock-jump").write_text(str(HOUR))
        steps = len(cluster.metrics())
        with cluster.losing_packets("rollout-server-0", "replay-buffer-0", "ppo-trainer-0", "ppo-trainer-1"):
            cluster.wait_for_step(steps + 2)
        assert cluster.restarts() == Counter(), cluster.told()
        before = {}
        for number, nodes in enumerate(PREEMPTED, start=1):
            steps = len(cluster.metrics())
            before |= {node: cluster.address(node) for node in nodes}
            assert steps < STEPS, "it came too late"
            cluster.destroy(*nodes)
            cluster.wait_until(lambda number=number: cluster.restarts().total() == number, "a restart")
            if nodes != PREEMPTED[-1]:
                cluster.wait_for_step(steps + 1)
        outcome = cluster.wait()
        return cluster, outcome, before


def test_a_run_survives_them(disturbed):
    cluster, outcome, before = disturbed
    assert outcome.exit_code == 0, cluster.told()
    assert outcome.restarts == {task_of(nodes[0]): 1 for nodes in PREEMPTED}, cluster.told()
    assert [node for node in before if cluster.address(node) == before[node]] == []
    assert cluster.summary()["status"] == "succeeded"


def test_it_loses_nothing_and_does_nothing_twice(disturbed):
    cluster, *_ = disturbed
    assert [record["step"] for record in cluster.metrics()] == list(range(1, STEPS + 1))
    store = Store(ReplaySettings(replay_dir=cluster.run_dir / "replay"))
    try:
        assert len(store.groups) == STEPS * BATCH, "a group was lost"
    finally:
        store.database.close()
    samples = [orjson.loads(line) for line in (cluster.run_dir / "samples.jsonl").read_bytes().splitlines()]
    # A group's id has its epoch and the prompt's place in it.
    uses = Counter(group for _, group in {(sample["step"], sample["group_id"]) for sample in samples})
    assert set(uses.values()) == {1}, f"prompts were used twice in an epoch: {uses.most_common(5)}"
    assert len(uses) == STEPS * BATCH, "a prompt was left out"


def test_it_trains_what_an_undisturbed_run_trains_by_the_other_transport(disturbed, guarded):
    cluster, *_ = disturbed
    rewards, others = ([record["reward_mean"] for record in one.metrics()] for one in (cluster, guarded.cluster))
    assert rewards == others, cluster.told()
    weights, same = ((one.run_dir / "model/model.safetensors").read_bytes() for one in (cluster, guarded.cluster))
    assert weights == same, "it learnt something else"


def test_its_clock_jumped(disturbed):
    cluster, *_ = disturbed
    times = [record["time"] for record in cluster.metrics()]
    assert abs(times[-1] - times[0] - HOUR) < HOUR / 2
