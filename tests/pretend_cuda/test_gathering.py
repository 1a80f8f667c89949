"""Publication on 8 ranks: parameters are cast before they are sent, in few collectives; of adapters nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from tests.pretend_cuda.seen import Call, Seen
from trainer.model.gathering import by_layer, gather
from trainer.model.policy import Policy
from trainer.model.rounding import UnbiasedRounding

pytestmark = pytest.mark.cuda
RANKS, WIDTH, LAYERS, LOW_RANK = 8, 256, 3, 8


class Layer(nn.Module):
    """A projection with its adapter, and a norm whose size does not divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lora_A = nn.Linear(WIDTH, LOW_RANK, bias=False)
        self.lora_B = nn.Linear(LOW_RANK, WIDTH, bias=False)
        self.norm = nn.Parameter(torch.empty(WIDTH + 1))


class Model(nn.Module):
    """Layers under the name that transformers gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


PER_LAYER = WIDTH * WIDTH + 2 * WIDTH * LOW_RANK + WIDTH + 1
PADDING = -(WIDTH + 1) % RANKS


@pytest.fixture(params=[0, 3])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def collectives(use: Callable[[Model], Any]) -> tuple[list[Call], Any]:
    """Return the collectives of ``use`` on a sharded model, and its result."""
    mesh = DeviceMesh("cuda", torch.arange(RANKS))
    with FakeTensorMode():
        with torch.device("cuda"):
            model = Model()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with Seen() as seen:
            result = use(model)
    return [call for call in seen.calls if "c10d" in call.name], result


def sent_bytes(call: Call) -> int:
    (tensor,) = call.args[1]
    return int(tensor.nbytes)


def test_a_layer_is_one_collective_of_the_published_type(rank: int) -> None:
    def publish(model: Model) -> dict[str, Any]:
        layers = by_layer(model.named_parameters())
        return {name: x for layer in layers for name, x in gather(layer, UnbiasedRounding()).items()}

    sent, whole = collectives(publish)
    assert [call.name for call in sent] == ["c10d.gather_.default"] * LAYERS
    assert {RANKS * sent_bytes(call) for call in sent} == {torch.bfloat16.itemsize * (PER_LAYER + PADDING)}
    if rank == 0:
        assert len(whole) == 4 * LAYERS
        assert {x.dtype for x in whole.values()} == {torch.bfloat16}
        assert whole["layers.0.norm"].shape == (WIDTH + 1,)
        assert whole["layers.2.projection.weight"].shape == (WIDTH, WIDTH)
        assert all(x.is_cuda for x in whole.values())
    else:
        assert whole == {}


def test_adapters_are_gathered_without_the_weights_that_they_adapt(rank: int) -> None:
    def publish(model: Model) -> dict[str, Any]:
        return dict(Policy(cast("PreTrainedModel", model), 1.0).adapter_parameters(torch.bfloat16))

    sent, whole = collectives(publish)
    assert [call.name for call in sent] == ["c10d.gather_.default"]
    assert RANKS * sent_bytes(sent[0]) == 2 * LAYERS * 2 * WIDTH * LOW_RANK
    assert len(whole) == (2 * LAYERS if rank == 0 else 0)
