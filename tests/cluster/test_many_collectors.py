"""Two dozen collectors on hosts of their own, one of which is destroyed: each prompt is taken once."""

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import BATCH, RUN
from tests.prompts_of_a_run import account

# The limit is for a hang; a run takes about a minute and a half.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 30


def test_the_loss_of_one_of_two_dozen_collectors_loses_and_doubles_no_prompt(tiny_model, tmp_path):
    settings = RUN | {"MAX_STEPS": str(STEPS), "ARITHMETIC_DIGITS": "2", "MAX_STALENESS": "2", "REPLAY_GROUPS": "0"}
    nodes = {"collector": 24, "rollout-server": 1, "ppo-trainer": 1}
    with Cluster(tmp_path, tiny_model, settings, num_nodes=nodes, job_group="jobgroups/async.yaml") as cluster:
        cluster.wait_for_step(3)
        cluster.destroy("collector-5")
        outcome = cluster.wait()
        assert outcome.exit_code == 0, cluster.told()
        assert outcome.restarts == {"collector": 1}, cluster.told()
        assert [record["step"] for record in cluster.metrics()] == list(range(1, STEPS + 1))
        counted = account(cluster.run_dir)
        assert counted.taken >= STEPS * BATCH
        assert (counted.doubled, counted.left_out) == (0, 0)
