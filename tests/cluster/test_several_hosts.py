"""The job group on several hosts, under the names that SkyPilot gives: nothing is on localhost."""

import pytest

from tests.cluster.cluster import Cluster
from tests.e2e.system import SETTINGS

# The limit is for a hang; a run takes about half a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 4
WORKERS = ["http://rollout-server-0.grpo:30001", "http://rollout-server-1.grpo:30001"]


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_it_trains_and_every_worker_has_every_version(tiny_model, tmp_path, transport):
    settings = SETTINGS | {"MAX_STEPS": str(STEPS), "EVAL_PROMPTS": "0", "PUBLISH_TRANSPORT": transport}
    with Cluster(tmp_path, tiny_model, settings) as cluster:
        cluster.wait_for_step(1)
        outcome = cluster.wait()
        assert outcome.exit_code == 0, cluster.told()
        assert outcome.restarts == {}, cluster.told()
        records = cluster.metrics()
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        assert [record["workers"] for record in records] == [2] * STEPS
        assert cluster.summary()["ranks"] == 2
