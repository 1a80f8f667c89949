"""A row of a linear layer's result is the same to the bit in any batch, whatever kernels a processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.core.linear import Head, Linear, PlainLinear, make_linear
from tests.tolerance import BOTH_TYPES, both_types

ROOT = Path(__file__).parents[3]
SHAPES = [(96, 17), (576, 151), (1536, 64), (2048, 512), (8192, 128), (11008, 128)]
"""Inputs and outputs. oneDNN sums more than 1,024 inputs in several parts, as in the MLPs of most models."""
BATCHES = (2, 3, 7, 8, 12, 31, 32, 33, 64, 129, 200)
ROWS = 300
CHECK_ALL = "from tests.services.core.test_linear import check_all; check_all()"


def check(layer: Linear, inputs: int, dtype: torch.dtype) -> None:
    """Compare rows computed alone and in batches of several sizes with the rows of one large batch."""
    x = torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = layer(x)
    alone = torch.cat([layer(row) for row in x.split(1)])
    assert torch.equal(alone, whole), f"{inputs} inputs, {dtype}: rows alone"
    for rows in BATCHES:
        part = slice(ROWS - rows, ROWS)
        assert torch.equal(layer(x[part].contiguous()), whole[part]), f"{inputs} inputs, {dtype}: {rows} rows"


def random_weight(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    return (weight / inputs**0.5).to(dtype), bias.to(dtype)


def check_all() -> None:
    torch.set_num_threads(1)
    for name in BOTH_TYPES:
        dtype = getattr(torch, name)
        for inputs, outputs in SHAPES:
            check(make_linear(*random_weight(inputs, outputs, dtype)), inputs, dtype)


@both_types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_in_any_batch_to_the_bit(shape: tuple[int, int], compute_type: str) -> None:
    dtype = getattr(torch, compute_type)
    weight, bias = random_weight(*shape, dtype)
    layer = make_linear(weight, bias)
    check(layer, shape[0], dtype)
    x = torch.randn(5, shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(layer(x).double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@both_types
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_row_is_the_same_in_any_batch_without_packed_weights(shape: tuple[int, int], compute_type: str) -> None:
    dtype = getattr(torch, compute_type)
    check(PlainLinear(*random_weight(*shape, dtype)), shape[0], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX512_CORE", "AVX2"])
def test_a_row_is_the_same_in_any_batch_on_processors_with_fewer_instructions(instructions: str) -> None:
    """oneDNN emulates bfloat16 with AVX512_CORE, and does not pack it with AVX2."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", CHECK_ALL], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_head_on_a_gpu_returns_float32(dtype: torch.dtype) -> None:
    """Tensors on the meta device have no values, and take a GPU's path."""
    logits = Head(torch.empty(17, 8, dtype=dtype, device="meta"))(torch.empty(5, 8, dtype=dtype, device="meta"))
    assert logits.dtype is torch.float32
    assert logits.shape == (5, 17)
