"""Publications to engines in this process, healthy ones and such as serve something else than they confirm."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.core.endpoints import WEIGHTS_BROADCAST_PORT
from services.core.errors import ConfigurationError
from services.core.tasks import ServiceThread
from services.embedded_engine import model as computing
from services.embedded_engine import weight_routes
from services.embedded_engine.app import create_app
from services.embedded_engine.engine import Engine
from services.embedded_engine.loading import Loaded
from services.embedded_engine.model import Weights
from services.engines.proof import MODEL_ALONE, UnprovenError, note_refusal
from services.engines.router import ENGINE_LABEL
from tests.fake_service import fake_service, name_router
from tests.sequences import trained_sequence
from tests.services.embedded_engine.conftest import settings_for
from tests.services.run_page.serving import served_ready
from tests.trainer.rank_jobs import change, make_learner
from tests.waiting import wait_until
from trainer.algorithm.packing import TrainingGroup
from trainer.loop import TrainingLoop
from trainer.model.ranks import join_ranks
from trainer.publishing import broadcast
from trainer.publishing.publisher import Publisher
from trainer.publishing.writer import VersionWriter

Fault = Callable[[pytest.MonkeyPatch], None]
STEP = 0.02
"""The change of a weight by a step: a bfloat16 weight shows it."""


class Member:
    """A member of the broadcast groups of this process, of which torch would allow one."""

    sent: ClassVar[list[Tensor]] = []
    """What rank 0 has sent to the present group."""

    def __init__(self, rank: int) -> None:
        self.received = 0
        if rank == 0:
            Member.sent = []

    def receive(self, tensor: Tensor) -> None:
        wait_until(lambda: len(Member.sent) > self.received, "the next tensor", every=0.001)
        tensor.copy_(Member.sent[self.received])
        self.received += 1


@pytest.fixture(autouse=True)
def groups_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (broadcast, weight_routes):
        monkeypatch.setattr(module, "join_weights_group", lambda _host, _port, rank, *_: Member(rank))
        monkeypatch.setattr(module, "leave_weights_group", lambda _: None)
    monkeypatch.setattr(weight_routes, "receive_weights", lambda tensor, member, _seconds: member.receive(tensor))
    monkeypatch.setattr(broadcast, "send_buckets", lambda buckets, *_, **__: Member.sent.extend(chain(*buckets)))


class Run:
    """A trainer's side with engines in this process, which are behind a router that forgets those it is told to."""

    label: ClassVar[dict[str, str]] = {ENGINE_LABEL: "embedded"}

    def __init__(
        self,
        stack: ExitStack,
        monkeypatch: pytest.MonkeyPatch,
        model: Path,
        directory: Path,
        workers: int,
        **fields: Any,
    ) -> None:
        self.urls = self.engines(stack, model, workers, fields)
        self.registered = [*self.urls]
        self.router = stack.enter_context(fake_service({"GET /workers": self._workers}))
        removals = {f"DELETE /workers/{number}": self._removal(url) for number, url in enumerate(self.urls)}
        self.router.routes |= removals
        name_router(self.router, monkeypatch, **{f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": "127.0.0.1:1"})
        ranks, thread = stack.enter_context(join_ranks()), stack.enter_context(ServiceThread())
        self.learner = make_learner(ranks, model, shared_dir=directory, run_id="r", **fields)
        self.writer = VersionWriter(self.learner.settings, self.learner.policy, ranks)
        stack.callback(self.writer.close)
        self.publisher = Publisher(self.learner.settings, thread, self.writer)

    def engines(self, stack: ExitStack, model: Path, count: int, fields: dict[str, Any]) -> list[str]:
        """Start engines, and return their URLs."""
        chosen = {"engine_dtype": fields.pop("engine_dtype", "float32"), "lora_rank": fields.get("lora_rank", 0)}
        made = [settings_for(model, **chosen) for _ in range(count)]
        return [stack.enter_context(served_ready(create_app(each))) for each in made]

    def publish(self, version: int, step: float = STEP) -> dict[str, float]:
        """Take a step, except before version 0, and publish."""
        if version and self.learner.settings.lora_rank:
            with torch.no_grad(), self.learner.policy.masters.in_place():
                for parameter in filter(lambda one: one.requires_grad, self.learner.policy.parameters()):
                    parameter.add_(torch.full_like(parameter, step))
        elif version:
            change(self.learner.policy, step)
        self.publisher.prover.remember(version, self.learner.policy, self.learner.logprobs)
        return self.publisher.publish(version)

    @property
    def refusals(self) -> list[dict[str, Any]]:
        return self.publisher.prover.refusals

    def _workers(self, _: dict[str, Any]) -> dict[str, Any]:
        listed = [{"id": str(self.urls.index(url)), "url": url} for url in self.registered]
        return {"workers": [each | {"is_healthy": True, "metadata": self.label} for each in listed]}

    def _removal(self, url: str) -> Callable[[dict[str, Any]], Any]:
        def remove(_: dict[str, Any]) -> dict[str, Any]:
            self.registered.remove(url)
            return {}

        return remove


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:
        yield lambda workers=1, **fields: Run(stack, monkeypatch, tiny_model, tmp_path, workers, **fields)


# --- healthy runs ---


@pytest.mark.parametrize(
    "fields",
    [
        {"compute_type": "float32"},
        {"compute_type": "float32", "publish_type": "bfloat16"},
        {"compute_type": "float32", "engine_dtype": "bfloat16"},
        {"compute_type": "float32", "publish_transport": "broadcast", "publish_type": "bfloat16"},
        {"compute_type": "float32", "publish_transport": "local", "mode": "async"},
        {"compute_type": "bfloat16", "engine_dtype": "bfloat16"},
    ],
    ids=["float32", "rounded", "narrow engine", "broadcast", "shared memory", "bfloat16"],
)
def test_weights_are_proven_to_the_bit_by_every_worker(start: Callable[..., Run], fields: dict[str, Any]) -> None:
    run = start(2, **fields)
    for version in range(3):
        metrics = run.publish(version)
        assert (metrics["workers_proven"], metrics["workers_refused"], metrics["workers"]) == (2, 0, 2)
        # Digests by name prove the others.
        assert ("probe_difference" in metrics) == (version == 0)
        assert metrics.get("probe_difference", 0.0) < 0.05
        assert metrics.get("served_version", version) == version
        assert metrics["proof_seconds"] > 0
    assert not run.refusals


def test_zeros_whose_sign_is_rounded_away_are_no_fault(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is on bfloat16's grid, so that the first publication has its own weights, and the same zeros as -0."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    tensors[UP][:2] = 0
    tensors[UP][2:4] = -0.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with ExitStack() as stack:
        run = Run(stack, monkeypatch, model, tmp_path, 1, compute_type="float32", publish_type="bfloat16")
        assert run.publish(0)["workers_proven"] == 1
        assert run.writer.is_exact


def test_adapters_are_told_from_each_other_and_from_none(start: Callable[..., Run]) -> None:
    run = start(compute_type="float32", lora_rank=2)
    served = [run.publish(version).get("served_version") for version in range(3)]
    assert served == [None, 1, 2]
    assert not run.refusals
    assert MODEL_ALONE in run.writer.evidence.answers


# --- faults ---


def stale(patch: pytest.MonkeyPatch) -> None:
    """Keep the weights, and confirm the version."""
    original = Engine.change_weights
    patch.setattr(
        Engine, "change_weights", lambda self, _, version: original(self, self._scheduler.model.weights, version)
    )


def lag(patch: pytest.MonkeyPatch) -> None:
    """Serve the version before."""
    original = Engine.change_weights
    waiting: dict[int, Weights] = {}

    def late(self: Engine, weights: Weights, version: str) -> Any:
        before = waiting.get(id(self), self._scheduler.model.weights)
        waiting[id(self)] = weights
        return original(self, before, version)

    patch.setattr(Engine, "change_weights", late)


def packed(patch: pytest.MonkeyPatch, spoil: Callable[[Loaded, dict[str, Tensor]], None]) -> None:
    """Have engines change named tensors before they load them."""
    original = Loaded.pack

    def pack(self: Loaded, tensors: dict[str, Tensor]) -> Weights:
        spoil(self, tensors)
        return original(self, tensors)

    patch.setattr(Loaded, "pack", pack)


GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


def partial(patch: pytest.MonkeyPatch) -> None:
    """Keep one tensor as it was first."""
    packed(
        patch,
        lambda loaded, tensors: tensors.update({GATE: dict(loaded.model.named_weights())[GATE].clone()}),
    )


def swapped(patch: pytest.MonkeyPatch) -> None:
    """Exchange gate and up projection of a layer."""
    packed(patch, lambda _, tensors: tensors.update({GATE: tensors[UP], UP: tensors[GATE]}))


def one_row(patch: pytest.MonkeyPatch) -> None:
    """Lose a row of a matrix."""

    def spoil(_: Loaded, tensors: dict[str, Tensor]) -> None:
        tensors[UP] = tensors[UP].clone()
        tensors[UP][3] = 0

    packed(patch, spoil)


@pytest.mark.parametrize("transport", ["disk", "broadcast", "local"])
@pytest.mark.parametrize(
    ("fault", "served", "tensors"),
    [(stale, 0, None), (lag, 0, None), (partial, None, [GATE]), (swapped, None, [GATE, UP]), (one_row, None, [UP])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_all_workers_ends_the_run_at_its_publication(
    start: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    fault: Fault,
    served: int | None,
    tensors: list[str] | None,
) -> None:
    run = start(compute_type="float32", publish_type="bfloat16", publish_transport=transport)
    run.publish(0)
    fault(monkeypatch)
    with pytest.raises(ConfigurationError) as ended:
        run.publish(1)
    [record] = run.refusals
    assert (record["worker"], record["confirmed"], record["served"]) == (run.urls[0], 1, served)
    assert tensors is None or sorted(record["tensors"]) == sorted(tensors)
    assert "confirms version 1" in str(ended.value)


def test_a_lost_adapter_ends_the_run_at_the_first_version_that_differs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(compute_type="float32", lora_rank=2)
    run.publish(0)
    monkeypatch.setattr(computing, "adapted", lambda linear, _low_rank, x, _rows: linear(x))
    with pytest.raises(ConfigurationError):
        run.publish(1)
    # The first adapter adds nothing either.
    assert [(each["confirmed"], each["served"] in (0, MODEL_ALONE)) for each in run.refusals] == [(1, True)]


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_one_stale_worker_of_two_leaves_the_routing_and_its_second_failure_ends_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    run = start(2, compute_type="float32", publish_transport=transport)
    run.publish(0)
    original = Engine.change_weights
    bad: list[Engine] = []

    def change_weights(self: Engine, weights: Weights, version: str) -> Any:
        if not bad:
            bad.append(self)
        return original(self, self._scheduler.model.weights if self is bad[0] else weights, version)

    monkeypatch.setattr(Engine, "change_weights", change_weights)
    metrics = run.publish(1)
    [record] = run.refusals
    assert (metrics["workers"], metrics["workers_refused"], metrics["workers_proven"]) == (1, 1, 1)
    assert record["served"] == 0
    assert run.registered == [url for url in run.urls if url != record["worker"]]
    run.publisher.keep_on_volume()
    run.writer.close()  # Now the version is on the volume.
    # What the worker's launcher leaves when the version that it has delivered again is not served either.
    note_refusal(run.writer.store.path(1), UnprovenError(record["worker"], 1, "as the test says"))
    with pytest.raises(ConfigurationError):
        run.publisher.keep_on_volume()
    assert [each["worker"] for each in run.refusals] == 2 * [record["worker"]]


# --- the parts of a mismatch ---


@pytest.mark.parametrize(
    ("staleness", "kl", "is_off", "part"),
    [
        (0.0, 1e-4, False, "sampling"),
        (0.0, 1e-4, True, "numeric"),
        (2.0, 0.2, False, "stale"),
        (2.0, 0.02, False, None),
        (0.0, 1e-9, False, None),
    ],
)
def test_an_unusual_mismatch_is_named_by_its_part(
    start: Callable[..., Run], staleness: float, kl: float, is_off: bool, part: str | None
) -> None:
    run = start(compute_type="float32")
    metrics = run.publish(0) | {"kl_behaviour": kl, "staleness_max": staleness}
    if is_off:
        change(run.learner.policy, STEP)
    groups = [TrainingGroup([5, 12], [trained_sequence([6, 15, 7], [-1.0] * 3)])]
    loop: Any = SimpleNamespace(
        learner=run.learner, publisher=run.publisher, on_all_ranks=lambda call: call, state=SimpleNamespace(step=1)
    )
    batch: Any = SimpleNamespace(groups=groups, prepared=lambda made: made)
    with structlog.testing.capture_logs() as lines:
        found = TrainingLoop.split_mismatch(loop, batch, metrics, 1)
    assert [line["part"] for line in lines if "part" in line] == ([part] if part else [])
    assert (found.get("gap_residual", 0.0) > 0.01) == is_off
    assert TrainingLoop.split_mismatch(loop, batch, metrics, 2) == {}
