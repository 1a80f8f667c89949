"""The cache of keys and values: bounded, and cut anew without losing what is in use."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from services.embedded_engine.kv_cache import KVCache, PrefixCache, common_length
from services.embedded_engine.weights import Architecture
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


def content(tokens: list[int]) -> torch.Tensor:
    """Keys and values that tell the whole conversation up to each token."""
    numbers = [hash(tuple(tokens[: end + 1])) % 2**31 for end in range(len(tokens))]
    return torch.tensor(numbers).view(1, 1, 1, -1, 1).expand(2, 1, 1, -1, 1)


def insert(cache: PrefixCache, tokens: list[int], *, use_adapter: bool = False) -> list[tuple[int, int]]:
    """The spans that were read."""
    spans: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> torch.Tensor:
        spans.append((start, stop))
        return content(tokens)[:, :, :, start:stop].clone()

    cache.insert(use_adapter, tokens, read)
    return spans


def found(cache: PrefixCache, tokens: list[int], *, use_adapter: bool = False) -> int:
    """The length of the known beginning, whose content is right."""
    parts = cache.find(use_adapter, tokens)
    if not parts:
        return 0
    whole = torch.cat(parts, 3)
    length = whole.shape[3]
    assert torch.equal(whole, content(tokens)[:, :, :, :length])
    return length


def test_the_longest_known_beginning_is_found_and_each_token_is_kept_once() -> None:
    generator = random.Random(0)
    cache, kept = PrefixCache(10**6), []
    for _ in range(300):
        tokens = [generator.randrange(2) for _ in range(generator.randrange(1, 14))]
        longest = max((common_length(tokens, other) for other in kept), default=0)
        assert found(cache, tokens) == longest
        assert insert(cache, tokens) == ([(longest, len(tokens))] if longest < len(tokens) else [])
        kept.append(tokens)
    assert cache.num_tokens == len({tuple(tokens[:end]) for tokens in kept for end in range(1, len(tokens) + 1)})


def test_what_was_not_used_for_longest_goes_first_and_ends_go_before_beginnings() -> None:
    cache = PrefixCache(12)
    first, second, third = [1, 1, 1, 1], [1, 1, 2, 2], [3, 3, 3, 3]
    for tokens in (first, second, third):
        insert(cache, tokens)
    assert cache.num_tokens == 10
    assert found(cache, first) == 4
    insert(cache, [5, 5, 5, 5])
    # second's end was used before first, but its beginning is first's, too.
    assert [found(cache, tokens) for tokens in (first, second, third, [5, 5, 5, 5])] == [4, 2, 4, 4]
    insert(cache, list(range(10, 23)))
    assert cache.num_tokens == 0


def test_the_adapters_conversations_are_apart_and_clearing_drops_all() -> None:
    cache = PrefixCache(100)
    insert(cache, [1, 2, 3], use_adapter=True)
    assert found(cache, [1, 2, 3]) == 0
    assert found(cache, [1, 2, 3], use_adapter=True) == 3
    generation = cache.generation
    cache.clear()
    assert found(cache, [1, 2, 3], use_adapter=True) == cache.num_tokens == 0
    assert cache.generation != generation
