"""Count the bytes that a rank sends in a step, on each axis of the mesh, by the collectives of FSDP themselves.

The real decoder's layers are sharded over a process group that transfers nothing (``fake``), and run forward and
backward under FakeTensorMode. Models of one and two layers are counted, and further layers cost what the second does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

NODES, NODE_GPUS = 2, 8
TOKENS = 8


@dataclass(frozen=True)
class Mesh:
    """A way to spread a model over the nodes."""

    name: str
    is_flat: bool
    frees_parameters: bool


MESHES = (
    Mesh("flat, SHARD_PARAMETERS=true", True, True),
    Mesh("flat, SHARD_PARAMETERS=false", True, False),
    Mesh("replicated between nodes, true", False, True),
    Mesh("replicated between nodes, false", False, False),
)


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step."""

    within: float
    """Over each GPU's link within its node."""
    between: float
    """Over each node's network, out of it."""


class Collectives(TorchDispatchMode):
    """A record of collectives: the bytes that each moves to or from a rank, by the size of its group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; record it if it is a collective."""
        name = str(func)
        if name.startswith("c10d."):
            sizes = [value.nbytes for arg in args for value in _tensors(arg)]
            group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
            kind = "all_reduce" if "allreduce" in name else "gather or scatter"
            self.bytes[f"{kind} of {group.size()}"] += max(sizes)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def count(config: PretrainedConfig, mesh: Mesh, micro_batches: int) -> Traffic:
    """Return the traffic of an optimizer step of a model on NODES x NODE_GPUS ranks."""
    one, two = (_collectives(_with_layers(config, n), mesh, micro_batches) for n in (1, 2))
    further = config.num_hidden_layers - 1
    found = {name: one[name] + further * (two[name] - one[name]) for name in two}
    ranks = NODES * NODE_GPUS
    # A collective over both nodes goes around a ring, which leaves each node once.
    flat = found.get(f"gather or scatter of {ranks}", 0)
    own = found.get(f"gather or scatter of {NODE_GPUS}", 0)
    reduced = found.get(f"all_reduce of {NODES}", 0)
    return Traffic(
        within=flat * (ranks - 1) / ranks + own * (NODE_GPUS - 1) / NODE_GPUS,
        between=flat * (ranks - 1) / ranks + NODE_GPUS * reduced * 2 * (NODES - 1) / NODES,
    )


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    return type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})


def _collectives(config: PretrainedConfig, mesh: Mesh, micro_batches: int) -> Counter[str]:
    """Return the bytes of a step's collectives by kind and size of the group."""
    with _device_mesh(mesh.is_flat) as ranks, FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        _shard(model, ranks, mesh.frees_parameters)
        ids, places = torch.zeros((1, TOKENS), dtype=torch.int64), torch.zeros((1, TOKENS), dtype=torch.int64)
        mask = torch.zeros((1, 1, TOKENS, TOKENS))
        with Collectives() as seen:
            for index in range(micro_batches):
                is_last = index == micro_batches - 1
                model.set_requires_gradient_sync(is_last or mesh.frees_parameters)
                model.set_reshard_after_backward(is_last or mesh.frees_parameters)
                model.set_requires_all_reduce(is_last)
                model.set_is_last_backward(is_last)
                model(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False).logits.sum().backward()
    found: Counter[str] = seen.bytes
    return found


def _shard(model: Any, mesh: DeviceMesh, frees_parameters: bool) -> None:
    """Shard a model as trainer/model/sharding.py does for a GPU."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=frees_parameters)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


@contextmanager
def _device_mesh(is_flat: bool) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=NODES * NODE_GPUS, store=FakeStore())
    try:
        if is_flat:
            yield init_device_mesh("cpu", (NODES * NODE_GPUS,))
        else:
            yield init_device_mesh("cpu", (NODES, NODE_GPUS), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()
