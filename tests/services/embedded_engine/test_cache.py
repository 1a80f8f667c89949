"""The cache of keys and values: bounded, and cut anew without losing what is in use."""

from __future__ import annotations

import psutil
import pytest
import torch

from services.embedded_engine.compute.kv_cache import KVCache
from services.embedded_engine.compute.weights import Architecture
from tests.services.embedded_engine.test_model import CONFIGS

CPU = torch.device("cpu")


def make(max_tokens: int = 1024, max_rows: int = 64) -> KVCache:
    return KVCache(Architecture.of(CONFIGS["qwen2"]), max_tokens, max_rows, torch.float32, CPU)


def fill(cache: KVCache, row: int, length: int, seed: int) -> torch.Tensor:
    content = torch.randn(2, cache.num_layers, cache.num_heads, length, cache.head_dim, generator=seeded(seed))
    cache.write(slice(row, row + 1), content)
    return content


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("length", "rows"), [(1, 16), (64, 16), (65, 8), (500, 2), (512, 2), (513, 1), (1024, 1), (5000, 1)]
)
def test_as_many_rows_fit_as_the_tokens_allow(length: int, rows: int) -> None:
    assert make().capacity(length) == rows


def test_rows_are_bounded_too() -> None:
    assert make(max_rows=3).capacity(10) == 3


def test_rows_keep_their_content_when_they_grow() -> None:
    cache = make()
    cache.ensure(60, 0, 0)
    contents = [fill(cache, row, 50, row) for row in range(5)]
    cache.ensure(150, 5, 50)
    assert cache.row_length == 192
    for row, content in enumerate(contents):
        assert torch.equal(cache.read(row, 0, 50), content)
    cache.ensure(60, 5, 50)
    assert cache.row_length == 192
    cache.ensure(60, 0, 0)
    assert cache.row_length == 64


def test_a_row_moves_onto_another() -> None:
    cache = make()
    fill(cache, 0, 30, 0)
    content = fill(cache, 3, 40, 1)
    cache.move(3, 0, 40)
    assert torch.equal(cache.read(0, 0, 40), content)


def test_what_was_never_written_is_zero_and_takes_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    cache = make(max_tokens=1_000_000)
    assert psutil.Process().memory_info().rss - before < 100 * 2**20  # of 768
    cache.ensure(1000, 0, 0)
    assert not cache.read(0, 0, 1000).any()
    cache.write(slice(0, 2), torch.ones(2, cache.num_layers, cache.num_heads, 5, cache.head_dim))
    assert cache.read(1, 0, 6)[..., :5, :].all()
