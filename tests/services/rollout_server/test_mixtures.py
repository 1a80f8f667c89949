"""A tiny mixture of experts is trained and published to a rollout node by both transports."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from services.core.endpoints import ENDPOINTS_VARIABLE, WEIGHTS_BROADCAST_PORT
from services.core.tasks import ServiceThread
from tests.ports import free_ports
from tests.sequences import trained_sequence
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.tolerance import logprob_tolerance
from tests.trainer.tiny import FAMILIES, random_groups, save_model
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings, Transport
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.publishing.publisher import Publisher, VersionWriter

pytestmark = pytest.mark.slow

PROBE = [5, 12, 6, 14, 3, 4, 1, 9, 8, 12, 7, 14, 2, 6, 1]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    model = save_model(tmp_path / "model", FAMILIES["qwen3_moe"])
    nodes = Nodes(tmp_path, model, environment={"ENGINE_DTYPE": "float32"})
    (port,) = free_ports(1)
    addresses = nodes.endpoints | {f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": f"127.0.0.1:{port}"}
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(addresses))
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "test")
    return nodes


def test_an_engine_computes_what_the_trainer_computes_after_each_publication(node: Nodes) -> None:
    settings = TrainerSettings.load(
        model_name=str(node.model),
        shared_dir=node.directory,
        run_id="test",
        jobgroup_token=TOKEN,
        publish_type="float32",
        compute_type="float32",
        learning_rate=1e-2,
    )
    zeros = [0.0] * len(PROBE[1:])
    probe = TrainingGroup(PROBE[:1], [trained_sequence(PROBE[1:], zeros, zeros)])

    async def rescore() -> list[float]:
        async with node.admin() as worker:
            return await worker.rescore(PROBE)

    seen: list[list[float]] = []
    torch.manual_seed(0)
    try:
        node.start_all()
        with join_ranks() as ranks, ServiceThread() as thread:
            learner = Learner(settings, load_policy(settings, ranks), ranks, None, 10)
            for version, transport in enumerate((Transport.DISK, Transport.BROADCAST), start=1):
                learner.update(random_groups(version), 0)
                chosen = settings.model_copy(update={"publish_transport": transport})
                publisher = Publisher(chosen, thread, VersionWriter(chosen, learner.policy, ranks))
                assert publisher.publish(version)["workers"] == 1, node.logs()
                publisher.writer.close()
                ((expected,),) = learner.logprobs([probe], 1.0)
                seen.append(asyncio.run(rescore()))
                assert seen[-1] == pytest.approx(expected, abs=logprob_tolerance("float32"))
    finally:
        node.stop()
    assert seen[0] != pytest.approx(seen[1], abs=1e-2)
