"""The job group on several hosts, under the names that SkyPilot gives: nothing is on localhost."""

import pytest

from tests.cluster.conftest import STEPS

# The limit is for a hang; a run takes about half a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(params=["guarded", pytest.param("undisturbed", marks=pytest.mark.slow)])
def finished(request):
    """A run of two trainer and two rollout nodes, by each transport of the weights."""
    return request.getfixturevalue(request.param)


def test_the_job_group_trains_to_the_end_without_restarts(finished):
    assert finished.outcome.exit_code == 0, finished.cluster.told()
    assert finished.outcome.restarts == {}, finished.cluster.told()
    assert finished.cluster.summary()["status"] == "succeeded"
    assert finished.cluster.summary()["ranks"] == 2
    assert [record["step"] for record in finished.metrics()] == list(range(1, STEPS + 1))


def test_every_version_reaches_both_workers(finished):
    assert [record["workers"] for record in finished.metrics()] == [2] * STEPS
    assert [int(answer.json["weight_version"]) >= 1 for answer in finished.served] == [True, True]


def test_each_node_has_a_name_and_an_address_of_its_own(finished):
    assert set(finished.names) == set(finished.cluster.nodes())
    assert len(set(finished.names.values())) == len(finished.names)


def test_nodes_talk_to_each_other_and_to_nobody_on_localhost(finished):
    addresses = finished.names
    for node, connections in finished.connections.items():
        remote = {far for near, far in connections if not near.startswith("127.")}
        assert remote <= set(addresses.values()), f"{node} talks to {remote}"
        local = {(near, far) for near, far in connections if near.startswith("127.") or near == "::1"}
        assert not local, f"{node} talks to itself: {local}"
    trainer = {far for _, far in finished.connections["ppo-trainer-0"]}
    assert addresses["ppo-trainer-1"] in trainer


def test_auxiliaries_are_gone_after_the_trainer(finished):
    assert finished.left == []


@pytest.mark.slow
def test_both_transports_train_the_same_model(undisturbed, guarded):
    assert undisturbed.model.read_bytes() == guarded.model.read_bytes()
