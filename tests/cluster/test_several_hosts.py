"""The job group on several hosts, under the names that SkyPilot gives: nothing is on localhost."""

import pytest

from tests.cluster.conftest import STEPS

# The limit is for a hang; a run takes about half a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_job_group_trains_to_the_end_without_restarts(guarded):
    assert guarded.outcome.exit_code == 0, guarded.cluster.told()
    assert guarded.outcome.restarts == {}, guarded.cluster.told()
    assert guarded.cluster.summary()["status"] == "succeeded"
    assert guarded.cluster.summary()["ranks"] == 2
    assert [record["step"] for record in guarded.cluster.metrics()] == list(range(1, STEPS + 1))


def test_each_node_has_a_name_and_an_address_of_its_own(guarded):
    assert set(guarded.names) == set(guarded.cluster.nodes())
    assert len(set(guarded.names.values())) == len(guarded.names)


def test_nodes_talk_to_each_other_and_to_nobody_on_localhost(guarded):
    addresses = guarded.names
    for node, connections in guarded.connections.items():
        remote = {far for near, far in connections if not near.startswith("127.")}
        assert remote <= set(addresses.values()), f"{node} talks to {remote}"
        local = {(near, far) for near, far in connections if near.startswith("127.") or near == "::1"}
        assert not local, f"{node} talks to itself: {local}"
    trainer = {far for _, far in guarded.connections["ppo-trainer-0"]}
    assert addresses["ppo-trainer-1"] in trainer


def test_auxiliaries_are_gone_after_the_trainer(guarded):
    assert guarded.left == []
