"""Deltas from a trainer's publisher to two rollout nodes, which are killed, come late and find damage."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.core.endpoints import ENDPOINTS_VARIABLE
from services.core.files import CHANGES_FILE
from services.core.machine import memory_directory
from services.core.tasks import ServiceThread
from services.weights.policy_store import is_delta
from tests.services.rollout_server.conftest import ENGINES, check_installed
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.trainer.rank_jobs import change
from tests.waiting import LIMIT_SECONDS, wait_until
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.publishing.publisher import Publisher, VersionWriter

pytestmark = pytest.mark.leaving


@pytest.fixture(scope="module", params=ENGINES)
def two(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two rollout nodes that follow deltas."""
    check_installed(request.param)
    environment = {"ROLLOUT_MAX_RESTARTS": "20", "PUBLISH_DELTA": "true"}
    nodes = Nodes(tmp_path_factory.mktemp("two"), tiny_model, 2, engine=request.param, environment=environment)
    try:
        yield nodes.start_all()
    finally:
        codes = nodes.stop()
    assert codes == [0, 0]
    assert list(memory_directory().glob("grpo-*-rollout-*")) == []


class Trainer:
    """A policy that changes, and its publisher; each version follows the one before."""

    def __init__(self, nodes: Nodes, publisher: Publisher) -> None:
        self.nodes = nodes
        self.publisher = publisher
        self.version = (nodes.store.newest_begun() or 0) + 1
        self.publish()

    def publish(self) -> None:
        self.version += 1
        change(self.publisher.writer.policy, 1e-6)
        self.publisher.publish(self.version)

    @property
    def is_delta(self) -> bool:
        return is_delta(self.nodes.store.path(self.version))

    def check_copies(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        """Every node serves the newest version, and has each of its bits."""
        state = dict(self.publisher.writer.policy.full_parameters(self.publisher.writer.rounding))
        for rank in ranks:
            self.nodes.wait_until(lambda rank=rank: self.nodes.serves(self.version, rank), "the newest version")
            [copy] = memory_directory().glob(f"grpo-*-rollout-{rank}")
            read = load_file(copy / "model.safetensors")
            assert all(torch.equal(read[name], value) for name, value in state.items())


@pytest.fixture
def trainer(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    two.wait_registered([0, 1])
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(two.endpoints))
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "test")
    fields: dict[str, Any] = {"shared_dir": two.directory, "run_id": "test", "jobgroup_token": TOKEN}
    settings = TrainerSettings.load(model_name=str(two.model), publish_delta=True, min_workers=2, **fields)
    with join_ranks() as ranks, ServiceThread() as thread:
        writer = VersionWriter(settings, load_policy(settings, ranks), ranks)
        yield Trainer(two, Publisher(settings, thread, writer))


def test_every_node_follows_the_deltas_to_the_bit(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.publish()
        assert trainer.is_delta
    trainer.check_copies()


def test_a_killed_engine_comes_back_with_the_newest_delta(two: Nodes, trainer: Trainer) -> None:
    trainer.publish()
    two.nodes[1].engine.kill()
    two.wait_registered([0])
    two.wait_registered([0, 1])
    assert trainer.is_delta
    trainer.check_copies()


def test_a_node_that_was_killed_and_comes_late_reads_the_anchor_and_all_deltas(two: Nodes, trainer: Trainer) -> None:
    trainer.publish()
    process = two.nodes[1].process
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_SECONDS)
    trainer.publisher.settings = trainer.publisher.settings.model_copy(update={"min_workers": 1})
    trainer.publish()
    trainer.publish()
    assert trainer.is_delta
    trainer.check_copies((0,))
    two.start(1)
    two.wait_registered([0, 1])
    trainer.check_copies()


def flip_a_bit(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("damage", [flip_a_bit, lambda content: content[:100]], ids=["flipped", "cut off"])
def test_a_damaged_delta_serves_nobody_and_is_written_again_whole(
    two: Nodes, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    commit = two.store.__class__.commit
    damaged: list[int] = []

    def commit_damaged(store: Any, version: int) -> Path:
        path = commit(store, version)
        if is_delta(path):
            damaged.append(version)
            (path / CHANGES_FILE).write_bytes(damage((path / CHANGES_FILE).read_bytes()))
        return path

    with monkeypatch.context() as patch:
        patch.setattr(two.store.__class__, "commit", commit_damaged)
        trainer.publish()
    assert damaged == [trainer.version]
    assert not trainer.is_delta
    trainer.check_copies()
    two.wait_registered([0, 1])
    trainer.publish()
    assert trainer.is_delta
    trainer.check_copies()


def test_a_version_that_was_damaged_later_is_written_again_for_the_node_that_needs_it(
    two: Nodes, trainer: Trainer
) -> None:
    trainer.publish()
    path = two.store.path(trainer.version) / CHANGES_FILE
    path.write_bytes(flip_a_bit(path.read_bytes()))
    process = two.nodes[1].process
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_SECONDS)
    two.start(1)
    wait_until(lambda: not two.store.is_complete(trainer.version), "the node has found the damage", told=two.logs)
    trainer.publisher.keep_on_volume()
    assert not trainer.is_delta
    two.wait_registered([0, 1])
    trainer.check_copies()
