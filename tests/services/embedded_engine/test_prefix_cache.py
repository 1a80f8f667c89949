"""The tree of prefixes against a plain list of conversations."""

from __future__ import annotations

import random

import torch

from services.embedded_engine.compute.prefix_cache import PrefixCache, common_length


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
