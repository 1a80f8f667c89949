"""The kernels that torch's compiler makes of a decoder layer, counted before any of them is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
import torch._functorch.config as partitioner
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.pretend_cuda.learner import packed_sequences
from trainer.algorithm.packing import ALONE, Context
from trainer.config import TrainerSettings
from trainer.config.sections import Checkpointing
from trainer.model.attention import TREE_ATTENTION, SharedLayout, windows_of
from trainer.model.sharding import GATHERED_EXPERTS, compile_layers


def kept_bytes(
    model: PretrainedConfig, tokens: int, sequence: int, checkpointing: Checkpointing, context: Context = ALONE
) -> int:
    """Return the bytes that a model's compiled layer keeps for the backward pass; weights and masks do not count.

    Args:
        model: the model.
        tokens: tokens of the micro-batch, of which a rank of a context group has its part.
        sequence: the length of its sequences.
        checkpointing: see ``count_layer``.
        context: the rank.
    """
    layout: Any = packed_sequences(tokens, sequence).layout
    kept: dict[int, int] = {}

    def stop(graph: GraphLowering) -> None:
        raise _CountedError

    with _compiled_layer(model, layout, stop, checkpointing, context) as (layer, compiled, (states, angles, mask)):
        masks = (mask.whole if isinstance(mask, SharedLayout) else mask).values()
        tables = (part for whole in masks for part in whole.as_tuple() if isinstance(part, Tensor))
        shared = [*layer.parameters(), *angles, *tables]
        others = {part.untyped_storage()._cdata for part in shared}

        def keep(tensor: Any) -> Any:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                storage = tensor.untyped_storage()
                if storage._cdata not in others:
                    kept[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = compiled(states, angles, mask)
        del output
    return sum(kept.values())


@contextmanager
def _compiled_layer(
    model: PretrainedConfig,
    layout: Any,
    on_kernels: Callable[[GraphLowering], None],
    checkpointing: Checkpointing,
    context: Context = ALONE,
) -> Iterator[tuple[Any, Callable[..., Tensor], tuple[Tensor, tuple[Tensor, Tensor], Any]]]:
    """Yield a model's layer in bfloat16, its compiled form, and arguments; ``on_kernels`` ends each compilation."""
    one = type(model)(**{**model.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    tokens = len(layout.ends) // context.size
    torch._dynamo.reset()
    with (
        TemporaryDirectory() as caches,
        pytest.MonkeyPatch.context() as patch,
        torch.device("cuda"),
        config.patch(force_disable_caches=True, compile_threads=1),
        partitioner.patch(activation_memory_budget=1.0),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", caches)
        patch.setattr(GraphLowering, "compile_to_module", on_kernels)
        compile_layers([], TrainerSettings.load(activation_checkpointing=checkpointing))  # for the compiler's options
        made = AutoModelForCausalLM.from_config(one, dtype=torch.bfloat16, attn_implementation=TREE_ATTENTION)
        made.base_model.set_experts_implementation(GATHERED_EXPERTS)
        layer = made.base_model.layers[0]
        states = torch.empty(1, tokens, one.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        turned = _head_size(one) // (1 + (one.model_type == "gpt_oss"))  # its angles are not repeated
        angles = tuple(torch.empty(1, tokens, turned, dtype=torch.bfloat16) for _ in range(2))
        backend = partial(compile_fx, inner_compile=_without_kernels)
        compiled = torch.compile(layer.forward, backend=backend, dynamic=False)

        def call(states: Tensor, angles: tuple[Tensor, Tensor], mask: Any) -> Tensor:
            return cast("Tensor", compiled(states, attention_mask=None, position_embeddings=angles, layout=mask))

        mask = layout.each(Tensor.cuda).prepared(windows_of(one))
        mask = mask if context.size == 1 else SharedLayout(mask, context.group, context.rank)
        yield layer, call, (states, cast("tuple[Tensor, Tensor]", angles), mask)


def _head_size(model: PretrainedConfig) -> int:
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


class NotRunError(Exception):
    """A graph has been compiled to machine code and would run."""


@contextmanager
def compiled_alone() -> Iterator[None]:
    """Within this context the first graph is compiled, with its backward pass, and NotRunError ends the context."""

    def stop(*_: Any) -> None:
        raise NotRunError

    with (
        pytest.MonkeyPatch.context() as patch,
        # Whether to pad a product is timed on the device.
        config.patch(compile_threads=1, shape_padding=False),
        partitioner.patch(force_non_lazy_backward_lowering=True),
    ):
        torch._dynamo.reset()
        patch.setattr(CompiledFxGraph, "__call__", stop)
        try:
            yield
        except NotRunError:
            return
        raise AssertionError("no graph was compiled")


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

    places = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    storages = {_storage(place): number for number, place in enumerate(places) if isinstance(place, Tensor)}

    def run(*arguments: Any) -> list[Any]:
        results: list[Any] = []
        for kind in kinds:
            if not isinstance(kind, Tensor):
                results.append(kind)
            elif (number := storages.get(_storage(kind))) is not None:
                # An input, such as a weight, or a view of one.
                results.append(arguments[number].as_strided(kind.shape, kind.stride(), kind.storage_offset()))
            else:
                results.append(torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype, device=kind.device))
        return results

    return make_boxed_func(run)  # type: ignore[no-any-return]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
