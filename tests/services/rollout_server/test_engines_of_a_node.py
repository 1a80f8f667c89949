"""Several engines on one node, each with GPUs, a port and a registration of its own, around engines without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.services.rollout_server.fake_nodes import FakeNodes, Traffic, fake_nodes
from tests.waiting import wait_until

CONFIG = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNodes]:
    """A node that pretends to have eight GPUs too small for the model, so that four engines have two each."""
    directory = tmp_path_factory.mktemp("node")
    smi = directory / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do echo 81920; done\n")
    smi.chmod(0o755)
    nodes = fake_nodes(
        directory,
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SGLANG_EXTRA_FLAGS="",
        PATH=f"{directory}:/usr/bin:/bin",
        ENGINE_HANG_SECONDS="3",
        ROLLOUT_MAX_RESTARTS="50",
    )
    nodes.model.joinpath("config.json").write_text(json.dumps(CONFIG))
    size = {"metadata": {"total_size": 60 * 2**30}}
    nodes.model.joinpath("model.safetensors.index.json").write_text(json.dumps(size))
    try:
        nodes.start()
        wait_registered(nodes)
        yield nodes
    finally:
        nodes.stop()


def wait_registered(nodes: FakeNodes, engines: int = 4) -> None:
    wanted = sorted(nodes.worker(0, engine).url for engine in range(engines))
    nodes.wait_until(lambda: nodes.registered() == wanted, f"workers {wanted}")


def test_every_engine_has_gpus_of_its_own_and_is_registered_by_itself(node: FakeNodes) -> None:
    told = [node.get(node.worker(0, engine), "/server_info").json() for engine in range(4)]
    assert [(engine["visible"], engine["tp_size"]) for engine in told] == [
        ("0,1", 2),
        ("2,3", 2),
        ("4,5", 2),
        ("6,7", 2),
    ]


def test_a_publication_reaches_every_engine(node: FakeNodes) -> None:
    with Traffic(node) as traffic:
        node.publish(1)
        before = len(traffic.groups)
        traffic.wait_for_groups(12)
        assert all(node.get(node.worker(0, e), "/model_info").json()["weight_version"] == "1" for e in range(4))
    assert 1 in traffic.versions(since=before)


def test_an_engine_that_dies_is_restarted_alone(node: FakeNodes) -> None:
    engines = {child.pid: child for child in node.nodes[0].children("sglang.launch_server")}
    assert len(engines) == 4
    with Traffic(node) as traffic:
        lost = next(child for child in engines.values() if str(node.worker(0, 2).port) in child.cmdline())
        lost.kill()
        wait_until(lambda: not lost.is_running(), "the engine is dead")
        wait_until(lambda: len(node.nodes[0].children("sglang.launch_server")) == 4, "another engine runs")
        wait_registered(node)
        traffic.wait_for_groups(6)
    left = {child.pid for child in node.nodes[0].children("sglang.launch_server")}
    assert len(left & set(engines)) == 3, "the other engines went on"
