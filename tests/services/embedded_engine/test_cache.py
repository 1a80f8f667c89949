"""The cache of keys and values: bounded, and cut anew without losing what is in use."""

from __future__ import annotations

import random

import psutil
import torch

from services.embedded_engine.kv_cache import KVCache, PrefixCache, common_length
from services.embedded_engine.state_cache import StatePrefixes
from services.embedded_engine.weights import Architecture
from tests.services.embedded_engine.test_model import CONFIGS

CPU = torch.device("cpu")


def make(max_tokens: int = 1024, max_rows: int = 64) -> KVCache:
    return KVCache(Architecture(CONFIGS["qwen2"]), max_tokens, max_rows, torch.float32, CPU)


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


def insert(cache: PrefixCache, tokens: list[int]) -> list[tuple[int, int]]:
    """The spans that were read."""
    spans: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> torch.Tensor:
        spans.append((start, stop))
        return content(tokens)[:, :, :, start:stop].clone()

    cache.insert(False, tokens, read)
    return spans


def found(cache: PrefixCache, tokens: list[int]) -> int:
    """The length of the known beginning, whose content is right."""
    known = cache.find(False, [*tokens, 0])
    if not known.length:
        return 0
    whole = torch.cat(known.parts, 3)
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


def test_kept_states_are_bounded_by_tokens_and_number_and_the_least_recently_used_go_first() -> None:
    prefixes = StatePrefixes(1000, 4, end_ids=())

    def compute(first: int, length: int) -> int:
        """Compute a prompt; return how many of its tokens were known."""
        beginning = prefixes.find(False, [first] * length)
        beginning.keep(length, "state", torch.zeros(length, 1))
        return beginning.length

    assert [compute(first, 100) for first in (1, 2, 3, 4)] == [0] * 4
    assert prefixes.num_tokens == 1000
    assert [compute(first, 100) for first in (1, 5, 1, 2)] == [99, 0, 99, 0]
    assert [compute(1, 600), compute(5, 100), compute(1, 100)] == [0, 0, 0]
    assert [compute(7, 1001), compute(7, 1001)] == [0, 0]
    assert prefixes.num_tokens == 500
