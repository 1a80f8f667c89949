"""The collectives of an optimizer step on one node of 8 GPUs and on two: which, how large, and none of them awaited."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException

from services.core.machine import installed_nccl
from tests.pretend_cuda.learner import pretended_learner, without_compilation
from tests.pretend_cuda.seen import Call, Seen
from tests.trainer.tiny import random_groups, with_heads_of
from trainer.model.gathering import by_layer

pytestmark = pytest.mark.cuda

GPUS, LAYERS = 8, 2
GROUPS = random_groups(1, n_groups=120, longest=12)


@dataclass(frozen=True)
class Step:
    nodes: int
    frees: bool
    """SHARD_PARAMETERS."""
    seen: Seen
    waits: list[str]
    """Calls by which the host waits for the device."""
    sizes: list[int]
    """Numbers of each layer's parameters and of the root's, padded to equal shards."""

    @property
    def passes(self) -> int:
        """Micro-batches of this rank."""
        return self.seen.names()["aten.embedding.default"]

    @property
    def layer(self) -> int:
        return self.sizes[1]

    @property
    def root(self) -> int:
        return self.sizes[0] + sum(self.sizes[1 + LAYERS :])

    def sent(self, kind: str) -> Counter[tuple[int, int]]:
        """Return how often collectives of a kind moved how many bytes among how many ranks."""
        return Counter(
            (group_of(call).size(), max(tensor.nbytes for tensor in tensors(call.args)))
            for call in self.seen.calls
            if call.name.startswith(f"c10d.{kind}")
        )


@pytest.fixture(scope="module", params=[(1, True), (1, False), (2, True), (2, False)], ids=str)
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Step]:
    nodes, frees = request.param
    waits: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        without_compilation(patch)
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            patch.setattr(owner, "synchronize", lambda *_, name=owner.__name__: waits.append(name))
        with (
            pretended_learner(
                tmp_path_factory.mktemp("model"),
                with_heads_of(16, "qwen2"),
                nodes=nodes,
                gpus=GPUS,
                shard_parameters=frees,
            ) as learner,
            Seen() as seen,
        ):
            with pytest.raises(DataDependentOutputException) as wait:
                learner.update(GROUPS, 0)
            assert "metrics" in [entry.name for entry in wait.traceback], wait.getrepr()
            whole = [layer.values() for layer in by_layer(learner.policy.named_parameters())]
            sizes = [sum(-(-p.shape[0] // GPUS) * GPUS * p.numel() // p.shape[0] for p in layer) for layer in whole]
            yield Step(nodes, frees, seen, waits, sizes)


def test_parameters_are_gathered_in_bfloat16_within_a_node(step: Step) -> None:
    assert step.passes >= 2
    # A freed layer is gathered again for its backward pass; the root, with the embedding, is kept until then.
    layers, roots = (2 * LAYERS * step.passes, step.passes) if step.frees else (LAYERS, 1)
    assert step.sent("_allgather_base") == {(GPUS, 2 * step.layer): layers, (GPUS, 2 * step.root): roots}


def test_gradients_are_reduced_in_float32_within_a_node(step: Step) -> None:
    times = step.passes if step.frees else 1
    expected = {(GPUS, 4 * step.layer): LAYERS * times, (GPUS, 4 * step.root): times}
    assert step.sent("_reduce_scatter_base") == expected


def test_replicas_add_up_their_shards_of_the_gradients_once_a_step(step: Step) -> None:
    found = step.sent("allreduce")
    shards = {size: n for size, n in found.items() if size[1] > 8}
    replicas = {(2, 4 * step.layer // GPUS): LAYERS, (2, 4 * step.root // GPUS): 1}
    assert shards == (replicas if step.nodes > 1 else {})
    assert found[GPUS * step.nodes, 8] == 1, "the loss of all ranks"


def test_no_other_collective_and_no_wait_of_the_host(step: Step) -> None:
    names = {call.name.split(".")[1] for call in step.seen.calls if call.name.startswith("c10d.")}
    assert names == {"_allgather_base_", "_reduce_scatter_base_", "allreduce_"}
    on_cpu = [call.name for call in step.seen.calls if "c10d" in call.name and not all_on_cuda(call)]
    assert on_cpu == [], "gloo's collectives wait"
    assert step.waits == []


def all_on_cuda(call: Call) -> bool:
    return all(tensor.is_cuda for tensor in tensors(call.args))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def group_of(call: Call) -> Any:
    return dist.ProcessGroup.unbox(next(arg for arg in call.args if isinstance(arg, torch.ScriptObject)))


def test_the_engines_get_the_nccl_of_the_trainers_torch() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    pins = [pin.split(";")[0] for pin in project["optional-dependencies"]["sglang"]]
    assert f"nvidia-nccl-cu13=={installed_nccl()}" in pins
