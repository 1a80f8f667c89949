"""The kernels that torch's compiler makes of a decoder layer, counted before any of them is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.scaling.roofline import Kernel
from tests.pretend_cuda.learner import packed_sequences
from trainer.algorithm.attention_layout import TILE, tiles
from trainer.model.attention import TREE_ATTENTION

PRODUCTS = {False: 2, True: 7}
"""Products of a tile in attention's forward and backward kernels; the backward kernel computes scores and their
gradients twice, once for the queries' gradients and once for those of keys and values."""


def count_layer(model: PretrainedConfig, tokens: int, sequence: int) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels, forward and backward, of a model's layer for tokens in sequences of a length, in bfloat16."""
    one = type(model)(**{**model.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    layout: Any = packed_sequences(tokens, sequence).layout
    n_tiles = sum(int(seen.sum()) for seen in tiles(layout.ends.long()))
    heads = one.num_attention_heads
    size = getattr(one, "head_dim", None) or one.hidden_size // heads
    counted: dict[bool, list[Kernel]] = {}

    def record(graph: GraphLowering) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        product = 2 * TILE * TILE * size * heads * n_tiles
        counted[graph.is_backward] = [
            kernel for node in graph.scheduler.nodes if (kernel := _kernel(node, PRODUCTS[graph.is_backward] * product))
        ]
        raise _CountedError

    with (
        TemporaryDirectory() as caches,
        pytest.MonkeyPatch.context() as patch,
        torch.device("cuda"),
        config.patch(force_disable_caches=True, compile_threads=1),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", caches)
        patch.setattr(GraphLowering, "compile_to_module", record)
        made = AutoModelForCausalLM.from_config(one, dtype=torch.bfloat16, attn_implementation=TREE_ATTENTION)
        layer = made.base_model.layers[0]
        states = torch.empty(1, tokens, one.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        angles = tuple(torch.empty(1, tokens, size, dtype=torch.bfloat16) for _ in range(2))
        mask = layout.each(Tensor.cuda).prepared()
        backend = partial(compile_fx, inner_compile=_without_kernels)
        compiled = torch.compile(layer.forward, backend=backend, dynamic=False)
        output = compiled(states, attention_mask=None, position_embeddings=angles, layout=mask)
        output.backward(torch.empty_like(output))
    return counted[False], counted[True]


class _CountedError(Exception):
    """The end of a compilation whose kernels have been counted."""


def _without_kernels(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph until its kernels are known, and return a function whose results have no values."""
    (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    kinds = [result.meta["val"] if isinstance(result, torch.fx.Node) else result for result in results]
    try:
        compile_fx_inner(graph, inputs, **options)
    except Exception as error:
        if "_CountedError" not in repr(error) and not isinstance(error.__cause__, _CountedError):
            raise

    def run(*_: Any) -> list[Any]:
        return [
            torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype, device=kind.device)
            if isinstance(kind, Tensor)
            else kind
            for kind in kinds
        ]

    return make_boxed_func(run)  # type: ignore[no-any-return]


def _kernel(node: Any, attention: float) -> Kernel | None:
    """Return what a kernel reads, writes and computes; ``attention`` is the operations of a kernel of attention."""
    moved = node.get_read_write_buffers_sizes()
    if not moved:
        return None
    if node.is_template():
        return Kernel("attention", attention, moved)
    if isinstance(node, ExternKernelSchedulerNode):
        return Kernel("product", float(node.estimate_flops() or 0), moved)
    return Kernel("fused", 0.0, moved)


def moved_by(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Return the bytes that each kernel of a compiled function without gradients reads and writes."""
    moved: list[int] = []

    def record(graph: GraphLowering) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        moved.extend(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes)
        raise _CountedError

    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True, compile_threads=1):
        patch.setattr(GraphLowering, "compile_to_module", record)
        backend = partial(compile_fx, inner_compile=_without_kernels)
        torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*arguments)
    return moved
