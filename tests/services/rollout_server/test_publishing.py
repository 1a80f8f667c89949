"""A trainer's publishers and two rollout nodes under traffic: the same tests for embedded engine and real SGLang."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.clients.rollout import SamplingParams
from services.core.endpoints import ENDPOINTS_VARIABLE, WEIGHTS_BROADCAST_PORT
from services.core.errors import DependencyLostError
from services.core.tasks import ServiceThread
from services.engines.engine import ASLEEP, Engine
from services.engines.router import RouterAdmin
from services.weights.policy_store import ADAPTER_NAME, CONFIG_FILE, WEIGHTS_FILE
from tests.adapters import RANK
from tests.ports import free_ports
from tests.sequences import trained_sequence
from tests.services.rollout_server.conftest import ENGINES, check_installed
from tests.services.rollout_server.fake_nodes import Traffic
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.tolerance import engine_tolerance
from tests.waiting import wait_until
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding
from trainer.publishing import broadcast
from trainer.publishing import publisher as publisher_module
from trainer.publishing.probe import AdapterProbe
from trainer.publishing.publisher import Publisher, ask_workers
from trainer.publishing.writer import VersionWriter

pytestmark = pytest.mark.slow

PROMPTS = [[5, 12, 6, 14], [7, 12, 3, 14], [9, 13, 4, 14]]  # such as "3+4*"
PROBE = [5, 12, 6, 14, 3, 4, 1, 9, 8, 12, 7, 14, 2, 6, 1]
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
        self._probe: AdapterProbe | None = None

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

    def probe(self) -> dict[str, float]:
        """Compares the workers' log-probabilities with the trainer's own, as after each publication."""
        assert self._policy is not None
        zeros = [0.0] * len(PROBE[1:])
        group = TrainingGroup(PROBE[:1], [trained_sequence(PROBE[1:], zeros, zeros)])
        learner = Learner(self._settings, self._policy, self._ranks, None, 1)
        assert self._publisher is not None
        if self._probe is None:
            ((alone,),) = learner.logprobs([group], 1.0, use_adapters=False)
            self._probe = AdapterProbe(self._publisher, PROBE, alone)
        ((expected,),) = learner.logprobs([group], 1.0)
        found: dict[str, float] = self._thread.call(self._probe.check(expected))
        return found

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.writer.close()


def wait_at_most(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the longest wait for a worker."""
    monkeypatch.setattr(publisher_module, "PUBLISH_SECONDS", seconds)


@pytest.fixture
def trainer(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    two.wait_registered([0, 1])
    (port,) = free_ports(1)
    addresses = two.endpoints | {f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": f"127.0.0.1:{port}"}
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(addresses))
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "test")
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", SOME_BUCKETS)
    wait_at_most(60, monkeypatch)
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


@pytest.mark.parametrize("in_place", [False, True], ids=["between", "in place"])
@pytest.mark.parametrize(
    ("transport", "lora_rank"),
    [("disk", 0), ("broadcast", 0), ("local", 0), ("disk", RANK), ("broadcast", RANK)],
    ids=["disk", "broadcast", "local", "adapters by disk", "adapters by broadcast"],
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


@pytest.mark.parametrize(
    ("transport", "lora_rank"), [("disk", 0), ("disk", RANK), ("local", 0)], ids=["whole", "adapters", "local"]
)
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


def test_a_worker_that_restarts_serves_the_newest_version_and_is_part_of_the_next(two: Nodes, trainer: Trainer) -> None:
    start_anew(two)
    trainer.use("broadcast", lora_rank=RANK)
    version, _ = trainer.publish()
    trainer.probe()
    engine = two.nodes[1].engine
    engine.kill()
    wait_until(lambda: not engine.is_running(), "the end of the engine")
    two.wait_registered([0])
    two.wait_registered([0, 1])
    assert two.version(1) == str(version)
    assert trainer.probe()["probe_difference"] < engine_tolerance()
    version, workers = trainer.publish()
    assert workers == 2
    assert [two.version(rank) for rank in (0, 1)] == [str(version)] * 2


def zero(worker: Engine, path: Path, version: int) -> Any:
    """Loads an adapter that changes nothing under the path of the new one."""
    tensors = load_file(path / WEIGHTS_FILE)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    config = json.loads((path / CONFIG_FILE).read_text())
    return worker.load_adapter_from_tensors(config, pickle.dumps(zeros), version)


load_adapter = Engine.load_adapter


def test_a_worker_without_the_published_adapter_leaves_the_routing_and_returns_with_it(
    two: Nodes, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_anew(two)
    trainer.use(lora_rank=RANK)
    trainer.publish()
    trainer.publish()
    assert trainer.probe()["probe_delivered"] == pytest.approx(1, abs=0.01)

    async def load(worker: Engine, path: Path, version: int) -> None:
        broken = worker.url == two.worker(1).url
        await (zero(worker, path, version) if broken else load_adapter(worker, path, version))

    dropped: list[list[str]] = []
    real = Publisher.drop_workers

    async def drop(publisher: Publisher, workers: Any) -> None:
        dropped.append([worker.url for worker in workers])
        await real(publisher, workers)

    monkeypatch.setattr(Publisher, "drop_workers", drop)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "load_adapter", load)
        version, workers = trainer.publish()
    assert workers == 2, "nobody has noticed yet"
    trainer.probe()
    assert dropped == [[two.worker(1).url]]
    two.wait_registered([0, 1])
    assert two.version(1) == str(version)
    found = trainer.probe()
    assert found["probe_difference"] < engine_tolerance()
    assert len(dropped) == 1


def test_publishing_waits_for_as_many_workers_as_there_must_be(
    two: Nodes, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def remove() -> None:
        async with RouterAdmin(two.router, TOKEN) as router:
            await router.remove(two.worker(1).url)

    trainer.use("disk", min_workers=2)
    asyncio.run(remove())
    assert trainer.publish()[1] == 2
    wait_at_most(1, monkeypatch)
    trainer.use("disk", min_workers=3)
    with pytest.raises(DependencyLostError, match=r"2 rollout workers are registered .* MIN_WORKERS is 3"):
        trainer.publish()


def test_a_worker_that_hangs_is_left_out_of_the_publication_and_catches_up(
    two: Nodes, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_at_most(5, monkeypatch)
    trainer.use("broadcast")
    engine = two.nodes[1].engine
    stopped = [engine, *engine.children(recursive=True)]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        version, workers = trainer.publish()
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)
    assert workers == 1
    assert two.version(0) == str(version)
    two.wait_registered([0, 1])
    assert two.version(1) == str(version)
