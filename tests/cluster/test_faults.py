"""What goes wrong between nodes, on a disk or with a clock: the run goes on, or ends recoverably and goes on later."""

import contextlib
import os
import re
import time
from pathlib import Path

import pytest

from local_runner.supervisor import State
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import BATCH, RUN, STEPS, Finished
from tests.cluster.test_preemption import assert_same_run, number_of_groups, uses_of_prompts

# The limit is for a hang; a run takes one to two minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

CLOCK = Path(__file__).with_name("clock")
HOUR = 3600


@pytest.mark.parametrize("node", ["rollout-server-0", "reward-server-0", "replay-buffer-0", "ppo-trainer-1"])
def test_a_link_that_is_cut_for_twenty_seconds(undisturbed, tiny_model, tmp_path, node):
    with Cluster(tmp_path, tiny_model, RUN) as cluster:
        cluster.wait_for_step(4)
        cluster.cut(node)
        time.sleep(20)
        assert len(cluster.metrics()) < STEPS, "the cut came too late"
        cluster.mend(node)
        outcome = cluster.wait()
        assert outcome.restarts == {}, cluster.told()
        assert_same_run(Finished(cluster, outcome=outcome), undisturbed)


def test_links_that_lose_packets(undisturbed, tiny_model, tmp_path):
    with (
        Cluster(tmp_path, tiny_model, RUN) as cluster,
        cluster.losing_packets("rollout-server-0", "replay-buffer-0", "ppo-trainer-0", "ppo-trainer-1"),
    ):
        outcome = cluster.wait()
        assert outcome.restarts == {}, cluster.told()
        assert_same_run(Finished(cluster, outcome=outcome), undisturbed)


def test_a_service_that_is_gone_for_long_costs_the_trainer_a_recoverable_end(undisturbed, tiny_model, tmp_path):
    with Cluster(tmp_path, tiny_model, RUN | {"SERVICE_DEADLINE_SECONDS": "15"}) as cluster:
        cluster.wait_for_step(4)
        cluster.cut("reward-server-0")
        ends = cluster.wait_until(
            lambda: [why for _, task, _, state, why in cluster.events if (task, state) == TRAINER_RESTARTS],
            "the trainer gives up",
        )
        assert ends[0].startswith("exit code 33")
        assert "reward-server did not answer" in cluster.log("ppo-trainer-0")
        cluster.mend("reward-server-0")
        outcome = cluster.wait()
        assert set(outcome.restarts) == {"ppo-trainer"}, cluster.told()
        assert_same_run(Finished(cluster, outcome=outcome), undisturbed)


TRAINER_RESTARTS = ("ppo-trainer", State.RESTARTING)


def test_a_full_disk_under_the_replay_buffer(undisturbed, tiny_model, tmp_path):
    with Cluster(tmp_path, tiny_model, RUN | {"REPLAY_DIR": "/node/replay"}, disks={"replay-buffer": "64m"}) as cluster:
        cluster.wait_for_step(4)
        disk = cluster.disk("replay-buffer-0")
        fill(disk / "full")
        cluster.wait_until(
            lambda: any((task, state) == TRAINER_RESTARTS for _, task, _, state, _ in cluster.events),
            "the trainer gives up",
        )
        assert "507" in cluster.log("ppo-trainer-0")
        assert "the replay-buffer's disk is full" in cluster.log("ppo-trainer-0")
        (disk / "full").unlink()
        outcome = cluster.wait()
        assert set(outcome.restarts) == {"ppo-trainer"}, cluster.told()
        run = Finished(cluster, outcome=outcome)
        log = cluster.log("ppo-trainer-0")
        # Without room for a snapshot the last checkpoint has no groups to replay, and says so.
        is_kept = "checkpoint without the replay buffer's contents" not in log
        comparable = STEPS if is_kept else int(re.findall(r"resumed .*step=(\d+)", log)[-1])
        rewards = [record["reward_mean"] for record in run.metrics()]
        assert len(rewards) == STEPS
        assert rewards[:comparable] == [record["reward_mean"] for record in undisturbed.metrics()][:comparable]
        assert not is_kept or run.model.read_bytes() == undisturbed.model.read_bytes()


def fill(path: Path) -> None:
    """Fills the disk that ``path`` is on."""
    with path.open("wb", buffering=0) as file:
        for block in (2**16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(block))
    assert os.statvfs(path).f_bavail == 0


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_clock_that_jumps(undisturbed, tiny_model, tmp_path, mode, jump):
    settings = {"MODE": mode, "PYTHONPATH": str(CLOCK), "CLOCK_JUMP_FILE": "/shared/clock-jump"}
    with Cluster(tmp_path, tiny_model, RUN | settings) as cluster:
        cluster.wait_for_step(4)
        (cluster.volume / "clock-jump").write_text(str(jump))
        outcome = cluster.wait()
        run = Finished(cluster, outcome=outcome)
        assert outcome.restarts == {}, cluster.told()
        times = [record["time"] for record in run.metrics()]
        assert abs(times[-1] - times[0] - jump) < HOUR / 2, "the clock did not jump"
        if mode == "sync":
            assert_same_run(run, undisturbed)
        else:
            assert outcome.exit_code == 0, cluster.told()
            assert set(uses_of_prompts(run).values()) == {1}
            assert number_of_groups(run) >= STEPS * BATCH
