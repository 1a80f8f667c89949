"""A trainer's publishers and two rollout nodes under traffic: the same tests for embedded engine and real SGLang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.clients.rollout import SamplingParams
from services.core.endpoints import ENDPOINTS_VARIABLE, WEIGHTS_BROADCAST_PORT
from services.core.tasks import ServiceThread
from services.engines.engine import ASLEEP
from services.weights.policy_store import ADAPTER_NAME
from tests.adapters import RANK
from tests.ports import free_ports
from tests.services.rollout_server.conftest import ENGINES, check_installed
from tests.services.rollout_server.fake_nodes import Traffic
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.tolerance import engine_tolerance
from trainer.config import TrainerSettings
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding
from trainer.publishing import broadcast
from trainer.publishing import publisher as publisher_module
from trainer.publishing.publisher import Publisher, ask_workers
from trainer.publishing.writer import VersionWriter

pytestmark = pytest.mark.slow

PROMPTS = [[5, 12, 6, 14], [7, 12, 3, 14], [9, 13, 4, 14]]  # such as "3+4*"
PARAMS = SamplingParams(max_new_tokens=24)
SOME_BUCKETS = 1 << 18  # bytes; the tiny model has 1.6 MiB


@pytest.fixture(scope="session", params=ENGINES)
def two(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two rollout nodes that serve the tiny model."""
    check_installed(request.param)
    environment = {"ROLLOUT_MAX_RESTARTS": "20", "LORA_RANK": str(RANK)}
    nodes = Nodes(tmp_path_factory.mktemp("two"), tiny_model, 2, engine=request.param, environment=environment)
    try:
        yield nodes.start_all()
    finally:
        nodes.stop()


class Trainer:
    """Rank 0 of a trainer: a policy that changes, and a publisher. Remembers the weights of every version."""

    def __init__(self, nodes: Nodes, thread: ServiceThread, ranks: Any) -> None:
        self.nodes = nodes
        self.change = 0.03
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self._thread = thread
        self._ranks = ranks
        self._generator = torch.Generator().manual_seed(0)
        self._policy: Policy | None = None
        self._publisher: Publisher | None = None

    def use(self, transport: str = "disk", **fields: Any) -> None:
        """Sets up the publisher; ``fields`` are settings."""
        self._settings = settings = TrainerSettings.load(
            model_name=str(self.nodes.model),
            shared_dir=self.nodes.directory,
            run_id="test",
            jobgroup_token=TOKEN,
            publish_transport=transport,
            **({"publish_type": "float32"} | fields),
        )
        self._policy = load_policy(settings, self._ranks)
        self._publisher = Publisher(settings, self._thread, VersionWriter(settings, self._policy, self._ranks))

    def publish(self) -> tuple[int, float]:
        """Changes the policy and publishes it; returns its version and how many workers serve it."""
        assert self._policy is not None
        version = (self.nodes.store.newest_begun() or 0) + 1
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, self._policy.parameters()):
                whole = parameter.to_local()  # there is one rank
                whole.add_(self.change * torch.randn(whole.shape, generator=self._generator))
        self.weights[version] = {n: p.clone() for n, p in self._policy.full_parameters(Rounding(torch.float32))}
        assert self._publisher is not None
        workers = self._publisher.publish(version)["workers"]
        return version, workers

    def put_workers_to_sleep(self) -> None:
        """Has all workers sleep, as a trainer on the same GPU before its update."""
        self._thread.call(ask_workers(self._settings, "sleep", lambda engine: engine.sleep()))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.writer.close()


@pytest.fixture
def trainer(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    two.wait_registered([0, 1])
    (port,) = free_ports(1)
    addresses = two.endpoints | {f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": f"127.0.0.1:{port}"}
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(addresses))
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "test")
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", SOME_BUCKETS)
    monkeypatch.setattr(publisher_module, "PUBLISH_SECONDS", 60)
    with join_ranks() as ranks, ServiceThread() as thread:
        made = Trainer(two, thread, ranks)
        try:
            yield made
        finally:
            made.close()


Scorer = Callable[[int, list[int]], list[float]]


def scorer(trainer: Trainer) -> Scorer:
    """Log-probabilities of ``ids[1:]`` under the weights of a version, as transformers computes them."""
    models: dict[int, Any] = {}

    def score(version: int, ids: list[int]) -> list[float]:
        if version not in models:
            model = AutoModelForCausalLM.from_pretrained(trainer.nodes.model, dtype=torch.float32).eval()
            model.load_state_dict(trainer.weights[version], strict=False)  # tied ones are there once
            models[version] = model
        with torch.inference_mode():
            scores = models[version](torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(scores[place - 1, ids[place]]) for place in range(1, len(ids))]

    return score


@pytest.mark.parametrize(
    ("transport", "lora_rank", "in_place"),
    [
        *(("disk", 0, False), ("broadcast", 0, False), ("broadcast", 0, True), ("local", 0, True)),
        *(("disk", RANK, True), ("broadcast", RANK, False)),
    ],
)
def test_every_token_is_of_the_version_that_it_is_said_to_be_of(
    two: Nodes, trainer: Trainer, transport: str, lora_rank: int, in_place: bool
) -> None:
    """Three versions are published during traffic."""
    if lora_rank:
        start_anew(two)
    trainer.use(transport, publish_in_place=in_place, lora_rank=lora_rank)
    first, workers = trainer.publish()
    assert workers == 2
    with traffic(two, lora_rank) as running:
        for _ in range(2):
            last, workers = trainer.publish()
            assert workers == 2
            running.wait_for_groups(2 * len(PROMPTS))
    assert [two.version(rank) for rank in (0, 1)] == [str(last)] * 2
    assert checked_versions(trainer, running) == {first, first + 1, last}


@pytest.mark.parametrize(("transport", "lora_rank"), [("disk", RANK), ("local", 0)])
def test_engines_that_slept_serve_the_next_version_alone(
    two: Nodes, trainer: Trainer, transport: str, lora_rank: int
) -> None:
    if lora_rank:
        start_anew(two)
    trainer.use(transport, lora_rank=lora_rank, engine_sleeps=True)
    trainer.publish()
    trainer.put_workers_to_sleep()
    asleep = [f"{two.store.newest().version}{ASLEEP}"] * 2  # type: ignore[union-attr]
    assert [two.version(rank) for rank in (0, 1)] == asleep
    # Another trainer, since that one died.
    trainer.use(transport, lora_rank=lora_rank, engine_sleeps=True)
    last, workers = trainer.publish()
    assert workers == 2
    with traffic(two, lora_rank) as running:
        pass
    assert checked_versions(trainer, running) == {last}


def traffic(nodes: Nodes, lora_rank: int) -> Traffic:
    return Traffic(
        nodes,
        lambda number, _: PROMPTS[number],
        concurrency=len(PROMPTS),
        params=PARAMS,
        lora_path=ADAPTER_NAME if lora_rank else None,
    )


def checked_versions(trainer: Trainer, traffic: Traffic) -> set[int]:
    """Compares every token with the version that it is said to be of; returns the versions."""
    score = scorer(trainer)
    seen = set()
    for prompt, completion in ((prompt, one) for prompt, group in traffic.answers for one in group):
        versions = {*completion.policy_versions.tolist()}
        seen |= versions
        ids = [*prompt, *completion.completion_ids.tolist()]
        for version in versions:
            sampled = completion.policy_versions == version
            wanted = np.array(score(version, ids)[len(prompt) - 1 :])
            assert completion.logprobs[sampled] == pytest.approx(wanted[sampled], abs=engine_tolerance())
    return seen


def start_anew(nodes: Nodes) -> None:
    """Has both workers serve the model that they started with, beside which adapters are computed."""

    async def reload() -> None:
        for rank in (0, 1):
            async with nodes.admin(rank) as worker:
                newest = nodes.store.newest()
                await worker.load_model(nodes.model, newest.version if newest else 0)

    asyncio.run(reload())
