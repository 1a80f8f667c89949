"""Attention alone on a GPU: each variant of its kernel, forward and backward, over a row of prompt trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.load import Figure
from benchmarks.update import Work
from trainer.algorithm.attention_layout import TreeMask
from trainer.algorithm.packing import pack
from trainer.model.attention import FLASH_PACKAGE, KERNELS

HEADS = {64: (14, 2), 128: (32, 8)}
"""Heads of queries and of keys by their width, as in Qwen2.5-0.5B and Qwen3-8B."""
ROW = Work("", prompts=4, group_size=8, prompt_tokens=100, completion_tokens=498)
"""A row of 16,384 tokens, with its padding."""
SECONDS = 3.0
"""Time for which each pass is repeated."""

TRITON = KERNELS["triton"]
SMALL_BACKWARD = {f"bwd_BLOCK_{side}": 64 for side in ("M1", "N1", "M2", "N2")}
VARIANTS: dict[tuple[int, str], dict[str, Any]] = {
    (64, "torch's own"): {"BACKEND": "TRITON"},
    (64, "whole tiles"): TRITON,
    (64, "8 warps"): TRITON | {"fwd_num_warps": 8},
    (64, "64 keys, 2 stages"): TRITON | {"fwd_BLOCK_N": 64, "bwd_num_stages": 2},
    (64, "64 keys, 8 warps"): TRITON | SMALL_BACKWARD | {"fwd_BLOCK_N": 64, "fwd_num_warps": 8, "bwd_num_warps": 4},
    (64, "64 x 64"): TRITON | SMALL_BACKWARD | {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "bwd_num_warps": 4},
    (64, "flash"): KERNELS["flash"],
    (128, "torch's own"): {"BACKEND": "TRITON"},
    (128, "whole tiles"): TRITON,
    (128, "2 stages"): TRITON | {"fwd_num_stages": 2, "bwd_num_stages": 2},
    (128, "128 keys"): TRITON | {"fwd_BLOCK_N": 128},
    (128, "128 keys, 2 stages"): TRITON | {"fwd_BLOCK_N": 128, "fwd_num_stages": 2},
    (128, "64 x 64"): TRITON | SMALL_BACKWARD | {"fwd_BLOCK_N": 32, "bwd_num_warps": 4, "bwd_num_stages": 2},
    (128, "flash"): KERNELS["flash"],
}
"""Options of ``flex_attention`` by the width of heads and a name."""


def mask_of(work: Work) -> TreeMask:
    """Return the mask of a row with a batch's groups, on the CPU."""
    layout = pack(work.groups(2, 0), TreeMask).layout
    assert isinstance(layout, TreeMask)
    return layout


def states(width: int, length: int) -> list[Tensor]:
    """Return random queries, keys and values [1, H, T, D] in bfloat16 on the GPU, with gradients."""
    queries, keys = HEADS[width]
    shapes = ((1, heads, length, width) for heads in (queries, keys, keys))
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def figures(width: int, options: dict[str, Any]) -> Iterator[Figure]:
    """Measure a variant's forward and backward pass, and its useful operations.

    Raises:
        SystemExit: the variant is of a package that is not installed, or does not compile for this card.
    """
    layout = mask_of(ROW)
    length, mask = len(layout.ends), layout.each(Tensor.cuda).prepared()[None]
    factors = states(width, length)
    torch._dynamo.reset()
    attend: Any = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    forward = partial(attend, *factors, block_mask=mask, enable_gqa=True, kernel_options=options)
    try:
        output = forward()
        gradient = torch.randn_like(output)
        backward = partial(torch.autograd.grad, output, factors, gradient, retain_graph=True)
        backward()
    except (RuntimeError, ImportError) as error:
        raise SystemExit(f"error: heads of {width}, {options}: {error}; flash needs {FLASH_PACKAGE}") from error
    pairs = int((layout.ends - torch.arange(length)).sum()) * HEADS[width][0]
    for name, run, products in (("forward", forward, 2), ("backward", backward, 5)):
        seconds = _seconds(run)
        yield Figure(name, 1000 * seconds, "ms")
        yield Figure(f"{name}, operations", 2e-12 * products * width * pairs / seconds, "TFLOP/s")


def _seconds(run: Callable[[], object]) -> float:
    """Return the mean seconds of a call, over calls of SECONDS."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    total, calls = 0.0, 1
    while total < SECONDS:
        began.record()
        for _ in range(calls):
            run()
        ended.record()
        ended.synchronize()
        total = began.elapsed_time(ended) / 1000
        calls *= 2
    return total / (calls // 2)
