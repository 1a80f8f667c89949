"""Groups are cut and shared out without losing or doubling anything, within bounds and in equal parts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sequences import trained_sequence
from tests.trainer.algorithm.shapes import fast, groups_of_many_shapes
from trainer.algorithm.attention_layout import runs
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.model.micro_batching import KEYS_PER_TOKEN, make_part, share_out
from trainer.model.ranks import join_ranks


def group_of(prompt: int, lengths: list[int]) -> TrainingGroup:
    """Return a group whose completions share nothing but the prompt."""
    return TrainingGroup(
        [0] * prompt, [trained_sequence([i] * n, [0.0] * n, [1.0] * n) for i, n in enumerate(lengths, start=1)]
    )


Contents = tuple[str, tuple[int, ...], tuple[int, ...], tuple[float, ...]]


def completions(groups: list[TrainingGroup]) -> Counter[Contents]:
    return Counter(
        (
            g.group_id,
            tuple(g.prompt_ids),
            tuple(s.completion_ids),
            None if s.advantages is None else tuple(s.advantages),
        )
        for g in groups
        for s in g.sequences
    )


@fast
@given(groups=groups_of_many_shapes(), n_ranks=st.integers(1, 5), max_tokens=st.integers(1, 200))
def test_every_completion_goes_with_its_prompt_to_one_micro_batch_of_one_rank(
    groups: list[TrainingGroup], n_ranks: int, max_tokens: int
) -> None:
    shares = share_out(groups, n_ranks, max_tokens)
    assert len(shares) == n_ranks
    assert len({len(batches) for batches in shares}) == 1, "every rank takes part in as many collectives"
    everything = [piece for batches in shares for pieces in batches for piece in pieces]
    assert completions(everything) == completions(groups)
    whole = {group.group_id: group.trained_tokens for group in groups}
    assert all((piece.cut_from or piece.trained_tokens) == whole[piece.group_id] for piece in everything)


@fast
@given(groups=groups_of_many_shapes(), n_ranks=st.integers(1, 5), max_tokens=st.integers(1, 200))
def test_a_micro_batch_exceeds_its_budget_only_for_a_single_completion(
    groups: list[TrainingGroup], n_ranks: int, max_tokens: int
) -> None:
    for batches in share_out(groups, n_ranks, max_tokens):
        for pieces in batches:
            tokens = sum(piece.tokens for piece in pieces)
            with_tokens = [s for piece in pieces for s in piece.sequences if s.tokens]
            is_single = len(pieces) == 1 and len(with_tokens) <= 1
            assert tokens <= max_tokens or is_single
            if pieces:
                paths = [path for path, _ in runs(pack(pieces).layout.ends)]
                assert sum(map(len, paths)) <= KEYS_PER_TOKEN * max_tokens or is_single


def test_many_groups_are_balanced_to_a_few_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (64, 8), generator=generator).tolist()
    groups = [group_of(30, own) for own in lengths]
    shares = share_out(groups, 4, 4096)
    loads = [sum(piece.tokens for pieces in batches for piece in pieces) for batches in shares]
    assert max(loads) / (sum(loads) / 4) < 1.03


def test_a_group_is_cut_where_ranks_would_be_idle_and_its_prompt_repeated() -> None:
    group = TrainingGroup([1, 2], [trained_sequence([3, i], [0.0, 0.0], [1.0, 1.0]) for i in range(4)], "only")
    shares = share_out([group], 4, 1000)
    assert [sum(len(piece.sequences) for pieces in batches for piece in pieces) for batches in shares] == [1] * 4
    assert all(piece.prompt_ids == [1, 2] for batches in shares for pieces in batches for piece in pieces)


def test_the_whole_group_shares_one_prompt_where_it_fits() -> None:
    group = TrainingGroup([1, 2], [trained_sequence([3], [0.0], [1.0])] * 8, "only")
    assert share_out([group], 1, 10) == [[[group]]]


def test_short_completions_of_a_long_prompt_do_not_multiply_it_without_bound() -> None:
    (batches,) = share_out([group_of(4000, [12] * 1000)], 1, 16_384)
    sizes = [len(piece.sequences) for pieces in batches for piece in pieces]
    assert sum(sizes) == 1000
    assert max(sizes) * 4012 <= KEYS_PER_TOKEN * 16_384


@pytest.mark.parametrize(("prompt", "count", "length"), [(4096, 16, 256), (8192, 16, 128), (16_000, 8, 40)])
def test_on_cuda_every_distinct_token_is_computed_once_wherever_a_group_fits(
    prompt: int, count: int, length: int
) -> None:
    group = group_of(prompt, [length] * count)
    assert group.tokens <= 16_384
    (batches,) = share_out([group], 1, 16_384, "cuda")
    assert [piece.tokens for pieces in batches for piece in pieces] == [group.tokens]
    (on_cpu,) = share_out([group], 1, 16_384)
    assert sum(piece.tokens for pieces in on_cpu for piece in pieces) > group.tokens, "keys are copied there"


def test_nothing_to_train_on_is_no_micro_batch() -> None:
    assert share_out([], 3, 100) == [[], [], []]
    assert share_out([TrainingGroup([1], [], "unscorable")], 2, 100) == [[], []]


def tree_of(turns: int, episodes: int, prompt: int = 40, length: int = 10) -> TrainingGroup:
    """Return a group in which every episode goes on from its turns so far, and each turn has a branch of its own."""
    token = iter(range(1, 1_000_000))
    sequences = []
    for _ in range(episodes):
        history: list[int] = []
        for _ in range(turns):
            own = [next(token) for _ in range(length)]
            sequences.append(trained_sequence(history + own, [0.0] * len(history + own), [1.0] * len(history + own)))
            history = history + [next(token) for _ in range(length)]
    return TrainingGroup([0] * prompt, sequences)


def test_a_large_tree_is_cut_between_its_episodes_rather_than_within_them() -> None:
    tree = tree_of(turns=4, episodes=12)
    (batches,) = share_out([tree], 1, 400)
    assert all(piece.tokens <= 400 for pieces in batches for piece in pieces)
    computed = sum(piece.tokens for pieces in batches for piece in pieces)
    assert computed == tree.tokens + 40 * (len(batches) - 1), "only the prompt is repeated"
    assert len(batches) <= -(-tree.tokens // 300)


def test_a_tree_is_cut_for_idle_ranks_so_that_their_parts_are_alike() -> None:
    shares = share_out([tree_of(turns=4, episodes=8)], 2, 10_000)
    loads = [sum(piece.tokens for pieces in batches for piece in pieces) for batches in shares]
    assert max(loads) / min(loads) < 1.1


def test_a_group_without_a_trained_token_counts_in_no_denominator() -> None:
    masked = TrainingGroup([0], [trained_sequence([7], [0.0], loss_mask=[False])])
    with join_ranks() as ranks:
        part = make_part([group_of(1, [2, 1]), masked], [masked], 100, ranks)
        assert (part.size.groups, part.size.sequences, part.size.tokens, part.micro_batches) == (1, 2, 3, [])
