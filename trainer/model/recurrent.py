"""Recurrent layers over packed trees of tokens: gated delta nets, Mamba-2, and the causal convolutions before them.

All else in these layers concerns one token at a time, and transformers computes it. Their modules call two functions
that mix tokens, a convolution and a scan, and hand on the keyword ``seq_idx``, with which users of packed rows say
where samples begin. ``share_states`` puts functions before these two that understand ``Segments`` under this keyword:
they compute the trees depth by depth by the model's own functions, so by the kernels of ``fla``, ``mamba-ssm`` and
``causal-conv1d`` where these are installed. A child begins from the state after its parent's last token, and its
gradient flows back into the parent by this state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from inspect import unwrap
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, softplus
from transformers import PretrainedConfig, PreTrainedModel

from services.core.errors import ConfigurationError
from trainer.algorithm.segments import HISTORY, Segments

RECURRENT = {
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("lfm2", "lfm2_moe"),
    *("granitemoehybrid", "nemotron_h"),
}
"""The types of models with recurrent layers that are computed over trees of tokens, and are tested to be."""
STATES = {"linear_attention", "conv"}
"""Their types of recurrent layers, in configurations."""
LAYER_TYPES = STATES | {"mlp", "moe"}
"""Their types of layers besides full attention."""
OLDEST = "5.19"
"""The oldest transformers whose modules call the functions below."""


def is_recurrent(config: PretrainedConfig) -> bool:
    """Return whether a model of a type in RECURRENT has recurrent layers: some of Granite 4 have none."""
    return config.model_type in RECURRENT and not STATES.isdisjoint(config.layer_types or STATES)


def obstacle_to_states(config: PretrainedConfig) -> str:
    """Return what keeps a model's recurrent layers from being computed over trees of tokens; "" if nothing does."""
    if Version(transformers.__version__) < Version(OLDEST):
        return f"has recurrent layers, whose states are shared with transformers {OLDEST} or newer"
    return ""


def share_states(model: PreTrainedModel) -> None:
    """Let the recurrent layers of a model's class compute trees of tokens where they are given ``Segments``.

    Raises:
        ConfigurationError: a convolution reads further back than the segments' inputs go.
    """
    kernel = max((part.kernel_size[0] for part in model.modules() if isinstance(part, nn.Conv1d)), default=0)
    if kernel > HISTORY + 1:
        raise ConfigurationError(
            f"MODEL_NAME: {model.config.model_type} has convolutions over {kernel} tokens, and trees of tokens have at "
            f"most {HISTORY + 1}; set LAYOUT=rows"
        )
    code = sys.modules[type(model).__module__]
    for name, over_trees in OVER_TREES.items():
        own = getattr(code, name, None)
        if own is not None and not isinstance(own, partial):
            setattr(code, name, update_wrapper(partial(over_trees, own), own))


@contextmanager
def without_kernels(mixer: nn.Module) -> Iterator[None]:
    """Let the modules of a mixer's file compute in PyTorch, also where kernels are installed, within the context."""
    code = vars(sys.modules[type(mixer).__module__])
    own = {name: code[name] for name in OVER_TREES if name in code}
    code.update({name: unwrap(function) for name, function in own.items()})
    try:
        yield
    finally:
        code.update(own)


@torch.no_grad()
def check_states(layers: Sequence[nn.Module], width: int) -> None:
    """Compare a model's first recurrent layer over a tree of three tokens with itself over one path of it.

    Args:
        layers: the model's layers.
        width: the size of their states.

    Raises:
        ConfigurationError: they differ, because transformers computes the layer in another way than ``share_states``
            expects.
    """
    layer = next(layer for layer in layers if mixes_by_states(layer))
    states = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
    path = torch.tensor([0, 2])
    in_tree = layer(states, position_embeddings=None, seq_idx=Segments.of(torch.tensor([3, 2, 3])))[:, path]
    alone = layer(states[:, path], position_embeddings=None)
    if not torch.allclose(in_tree, alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
        raise ConfigurationError(
            f"LAYOUT=tree: {type(layer).__name__} of transformers {transformers.__version__} does not begin branches "
            "from the states before them; set LAYOUT=rows"
        )


def mixes_by_states(layer: nn.Module) -> bool:
    """Return whether a decoder layer is recurrent: then it has a convolution."""
    return any(isinstance(part, nn.Conv1d) for part in layer.modules())


def convolve(
    own: Callable[..., Tensor], inputs: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute a causal convolution of packed tokens [1, C, T] by the model's ``own`` function, along their paths."""
    segments = options.get("seq_idx")
    if not isinstance(segments, Segments):
        return own(inputs, weight, bias, **options)
    with_zeros = pad(inputs[0].T, (0, 0, 0, 1))
    row = embedding(segments.history, with_zeros).T[None]
    outputs = own(row, weight, bias, activation=options.get("activation"))
    return embedding(segments.places, outputs[0].T).T[None]


def delta_rule(
    own: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule of packed tokens by the model's ``own`` function, along their paths.

    Args:
        own: the function, of whole sequences; it takes ``initial_state`` and returns the final one.
        query: [1, T, H, K].
        key: [1, T, H, K].
        value: [1, T, H, V].
        g: [1, T, H], logarithms of decays; 0 leaves a state as it is.
        beta: [1, T, H], rates of writing; 0 writes nothing.
        options: of ``own``, and ``seq_idx``.

    Returns:
        The outputs [1, T, H, V]; with ``Segments``, None for the final state.
    """
    segments = options.pop("seq_idx", None)
    if not isinstance(segments, Segments):
        result: tuple[Tensor, Tensor | None] = own(query, key, value, g=g, beta=beta, seq_idx=segments, **options)
        return result

    def scan(tokens: list[Tensor], gates: list[Tensor], state: Tensor | None, is_kept: bool) -> tuple[Tensor, Tensor]:
        kept = options | {"initial_state": state, "output_final_state": is_kept}
        result: tuple[Tensor, Tensor] = own(*tokens, g=gates[0], beta=gates[1], **kept)
        return result

    return _by_depth(segments, [query, key, value], [g, beta], scan), None


def mamba2_scan(
    own: Callable[..., Any], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any
) -> Tensor:
    """Compute Mamba-2's state-space scan of packed tokens by the model's ``own`` function, along their paths.

    Args:
        own: the function, of whole sequences; it takes ``initial_states`` and can return the final ones.
        x: [1, T, H, P].
        dt: [1, T, H], time steps before ``dt_bias``, softplus and ``dt_limit``.
        a: [H], rates of decay.
        b: [1, T, G, N], from inputs to states.
        c: [1, T, G, N], from states to outputs.
        options: of ``own``, and ``seq_idx``.

    Returns:
        [1, T, H, P].
    """
    segments = options.pop("seq_idx", None)
    if not isinstance(segments, Segments):
        result: Tensor = own(x, dt, a, b, c, seq_idx=segments, **options)
        return result

    # Padding has the step 0, which leaves a state as it is; the model's limit would make it longer.
    step = softplus(dt.float() + options.pop("dt_bias").float()).clamp(*options.pop("dt_limit"))
    options["dt_softplus"] = False

    def scan(tokens: list[Tensor], gates: list[Tensor], state: Tensor | None, is_kept: bool) -> tuple[Tensor, Any]:
        kept = options | {"initial_states": state, "return_final_states": is_kept}
        result = own(tokens[0], gates[0], a, *tokens[1:], **kept)
        return result if is_kept else (result, None)

    return _by_depth(segments, [x, b, c], [step], scan)


OVER_TREES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
"""The functions to put before transformers' own, by the names that the latter have in its modules."""


def _by_depth(
    segments: Segments,
    tokens: Sequence[Tensor],
    gates: Sequence[Tensor],
    scan: Callable[[list[Tensor], list[Tensor], Tensor | None, bool], tuple[Tensor, Any]],
) -> Tensor:
    """Return the outputs [1, T, ...] of a recurrence over trees, computed depth by depth.

    Args:
        segments: the segments of the trees.
        tokens: what the recurrence reads of each token, [1, T, ...]. Padding has that of token 0.
        gates: [1, T, H] each; padding has zeros, which leave a state as it is.
        scan: from R rows of tokens and gates, [R, L, ...], the states [R, ...] that they begin from, or None, and
            whether their states are needed, the outputs [R, L, ...] and the states after the last tokens.
    """
    outputs: list[Tensor] = []
    states: Tensor | None = None
    for number, scans in enumerate(segments.depths, start=1):
        is_kept = number < len(segments.depths)
        after: list[Tensor] = []
        for one in scans:
            rows = [rows_of(x[0], one.rows) for x in tokens]
            gated = [rows_of(x[0], one.rows).masked_fill(one.is_padding[..., None], 0) for x in gates]
            begun = None if states is None or one.parents is None else rows_of(states, one.parents)
            output, final = scan(rows, gated, begun, is_kept)
            outputs.append(output.flatten(0, 1))
            after.append(final)
        states = torch.cat(after) if is_kept else None
    return rows_of(torch.cat(outputs), segments.unpack)[None]


def rows_of(states: Tensor, rows: Tensor) -> Tensor:
    """Return ``states[rows]``. The gradient of indexing would add up repeated rows number by number."""
    return embedding(rows, states.flatten(1)).view(*rows.shape, *states.shape[1:])
