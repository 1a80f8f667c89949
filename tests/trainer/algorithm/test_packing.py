"""Groups are cut, shared out and packed without losing, doubling or mixing anything."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.packing import KEYS_PER_TOKEN, MicroBatch, TrainingGroup, TrainingSequence, pack, share_out

fast = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def groups_of_many_shapes(draw: st.DrawFn, most: int = 8) -> list[TrainingGroup]:
    """Draw groups in which tokens and their advantages are different numbers, and some tokens are not trained."""
    token = iter(range(1, 1_000_000))
    groups = []
    for g in range(draw(st.integers(0, most))):
        prompt = [next(token) for _ in range(draw(st.integers(1, 20)))]
        lengths = draw(st.lists(st.integers(0, 30), min_size=0, max_size=6))
        sequences = [
            TrainingSequence(
                ids := [next(token) for _ in range(n)],
                [-t / 1e6 for t in ids],
                [t / 1e3 for t in ids],
                draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n)),
            )
            for n in lengths
        ]
        groups.append(TrainingGroup(prompt, sequences, f"group-{g}", weight=g + 0.5, is_replayed=g % 2 == 1))
    return groups


Contents = tuple[str, tuple[int, ...], tuple[int, ...], tuple[float, ...]]


def completions(groups: list[TrainingGroup]) -> Counter[Contents]:
    return Counter(
        (g.group_id, tuple(g.prompt_ids), tuple(s.completion_ids), tuple(s.advantages))
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


@fast
@given(groups=groups_of_many_shapes(), n_ranks=st.integers(1, 5), max_tokens=st.integers(1, 200))
def test_a_micro_batch_exceeds_its_budget_only_for_a_single_completion(
    groups: list[TrainingGroup], n_ranks: int, max_tokens: int
) -> None:
    for batches in share_out(groups, n_ranks, max_tokens):
        for pieces in batches:
            tokens = sum(piece.tokens for piece in pieces)
            with_tokens = [s for piece in pieces for s in piece.sequences if s.completion_ids]
            is_single = len(pieces) == 1 and len(with_tokens) <= 1
            assert tokens <= max_tokens or is_single
            longest = max((len(g.prompt_ids) for g in pieces), default=0)
            longest += max((len(s.completion_ids) for s in with_tokens), default=0)
            keys = longest * sum(len(piece.sequences) for piece in pieces)
            assert keys <= KEYS_PER_TOKEN * max_tokens or is_single


@fast
@given(groups=groups_of_many_shapes(), n_ranks=st.integers(1, 5), max_tokens=st.integers(20, 200))
def test_ranks_differ_by_no_more_than_one_piece(groups: list[TrainingGroup], n_ranks: int, max_tokens: int) -> None:
    shares = share_out(groups, n_ranks, max_tokens)
    loads = [sum(piece.tokens for pieces in batches for piece in pieces) for batches in shares]
    largest = max((piece.tokens for batches in shares for pieces in batches for piece in pieces), default=0)
    assert max(loads) - min(loads) <= largest


def test_many_groups_are_balanced_to_a_few_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (64, 8), generator=generator).tolist()
    groups = [
        TrainingGroup([1] * 30, [TrainingSequence([2] * n, [0.0] * n, [1.0] * n) for n in own]) for own in lengths
    ]
    shares = share_out(groups, 4, 4096)
    loads = [sum(piece.tokens for pieces in batches for piece in pieces) for batches in shares]
    assert max(loads) / (sum(loads) / 4) < 1.03


def test_a_group_is_cut_where_ranks_would_be_idle_and_its_prompt_repeated() -> None:
    group = TrainingGroup([1, 2], [TrainingSequence([3, i], [0.0, 0.0], [1.0, 1.0]) for i in range(4)], "only")
    shares = share_out([group], 4, 1000)
    assert [sum(len(piece.sequences) for pieces in batches for piece in pieces) for batches in shares] == [1] * 4
    assert all(piece.prompt_ids == [1, 2] for batches in shares for pieces in batches for piece in pieces)


def test_the_whole_group_shares_one_prompt_where_it_fits() -> None:
    group = TrainingGroup([1, 2], [TrainingSequence([3], [0.0], [1.0])] * 8, "only")
    assert share_out([group], 1, 10) == [[[group]]]


def group_of(prompt: int, lengths: list[int]) -> TrainingGroup:
    return TrainingGroup([1] * prompt, [TrainingSequence([2] * n, [0.0] * n, [1.0] * n) for n in lengths])


def padded_tokens(pieces: list[TrainingGroup]) -> int:
    lengths = [len(s.completion_ids) for piece in pieces for s in piece.sequences]
    return len(lengths) * max(lengths)


@pytest.mark.parametrize(
    "groups",
    [[group_of(150, [4096] + [100] * 120)], [group_of(150, [n] * 8) for n in [4096] + [100] * 15]],
    ids=["in a group", "among groups"],
)
def test_one_long_completion_does_not_pad_many_short_ones(groups: list[TrainingGroup]) -> None:
    assert share_out(groups, 1, 140_000) == [[groups]], "it fits a large budget"
    (batches,) = share_out(groups, 1, 16_384)
    assert sum(map(padded_tokens, batches)) < padded_tokens(groups) / 3


def test_short_completions_of_a_long_prompt_do_not_multiply_it_without_bound() -> None:
    (batches,) = share_out([group_of(4000, [12] * 1000)], 1, 16_384)
    sizes = [len(piece.sequences) for pieces in batches for piece in pieces]
    assert sum(sizes) == 1000
    assert max(sizes) * 4012 <= KEYS_PER_TOKEN * 16_384


def test_the_demo_trains_in_one_micro_batch() -> None:
    groups = [group_of(40, [12] * 8) for _ in range(8)]
    assert share_out(groups, 1, 16_384) == [[groups]]


def test_nothing_to_train_on_is_no_micro_batch() -> None:
    assert share_out([], 3, 100) == [[], [], []]
    assert share_out([TrainingGroup([1], [], "unscorable")], 2, 100) == [[], []]


def in_order(batch: MicroBatch) -> list[list[int]]:
    """Return the completion tokens of each completion."""
    return [batch.targets[batch.sequence_ids == s].tolist() for s in range(batch.n_sequences)]


@fast
@given(groups=groups_of_many_shapes())
def test_a_packed_token_is_predicted_from_the_one_before_it_in_its_own_completion(groups: list[TrainingGroup]) -> None:
    groups = [g for g in groups if g.sequences]
    if not groups:
        return
    batch = pack(groups)
    rows = [(group, sequence) for group in groups for sequence in group.sequences]
    assert in_order(batch) == [sequence.trained(sequence.completion_ids) for _, sequence in rows]
    assert len(batch.input_ids) == sum(group.tokens for group in groups), "no padding"
    read = iter(batch.input_ids[batch.predict_rows].tolist())
    for group, sequence in rows:
        context = [*group.prompt_ids, *sequence.completion_ids]
        before = sequence.trained(context[len(group.prompt_ids) - 1 : -1])
        assert [next(read) for _ in before] == before
    logprobs = [x for _, s in rows for x in s.trained(s.behaviour_logprobs)]
    assert batch.behaviour_logprobs.tolist() == pytest.approx(logprobs)
    assert batch.advantages.tolist() == pytest.approx([x for _, s in rows for x in s.trained(s.advantages)])
    assert batch.weights.tolist() == [g.weight for g, s in rows for _ in range(s.trained_tokens)]
    assert batch.is_replayed.tolist() == [g.is_replayed for g, s in rows for _ in range(s.trained_tokens)]


@fast
@given(groups=groups_of_many_shapes(most=4))
def test_positions_go_on_from_the_prompt_and_a_token_sees_its_own_past_only(groups: list[TrainingGroup]) -> None:
    groups = [g for g in groups if g.sequences]
    if not groups:
        return
    batch, layout = pack(groups), pack(groups).layout
    position = dict(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
    completion = 0
    for index, group in enumerate(groups):
        assert [position[t] for t in group.prompt_ids] == list(range(len(group.prompt_ids)))
        for sequence in group.sequences:
            ids = sequence.completion_ids[:-1]
            assert [position[t] for t in ids] == [len(group.prompt_ids) + i for i in range(len(ids))]
            assert layout.piece_of_completion[completion] == index
            keys = torch.cat([layout.prompt_rows[index], layout.completion_rows[completion]])
            for i in range(len(ids)):
                assert layout.completion_rows[completion, i] == (batch.input_ids == ids[i]).nonzero()
                seen = batch.input_ids[keys[layout.mask[completion, 0, i]]].tolist()
                assert seen == [*group.prompt_ids, *ids[: i + 1]]
            completion += 1


@fast
@given(groups=groups_of_many_shapes(most=4))
def test_what_attention_takes_apart_it_puts_back_in_place(groups: list[TrainingGroup]) -> None:
    groups = [g for g in groups if g.sequences]
    if not groups:
        return
    batch = pack(groups)
    apart = torch.cat(
        [batch.input_ids[batch.layout.prompt_rows].flatten(), batch.input_ids[batch.layout.completion_rows].flatten()]
    )
    assert torch.equal(apart[batch.layout.unpack], batch.input_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_additive_mask_hides_the_same_in_aligned_rows(dtype: torch.dtype) -> None:
    layout = pack([group_of(5, [3, 1]), group_of(2, [4])]).layout
    mask = layout.with_additive_mask(dtype).mask
    assert mask.dtype == dtype
    assert mask.shape == layout.mask.shape
    assert torch.equal(mask == 0, layout.mask)
    assert torch.equal(mask == -torch.inf, ~layout.mask)
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_a_rank_with_nothing_left_computes_a_filler_that_weighs_nothing() -> None:
    batch = pack([])
    assert batch.is_filler
    assert batch.advantages.abs().sum() + batch.weights.abs().sum() == 0
    assert not pack([TrainingGroup([1], [TrainingSequence([2], [0.0], [1.0])])]).is_filler


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0] * 3], ids=len)
def test_a_truncated_record_is_refused(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match=f"2 completion_ids but {len(logprobs)} behaviour_logprobs"):
        TrainingSequence([3, 4], logprobs, [1.0, 1.0])
    with pytest.raises(ValueError, match="2 completion_ids but 1 loss_mask"):
        TrainingSequence([3, 4], [-1.0, -1.0], [1.0, 1.0], [True])


def test_a_group_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="'g7' has no prompt_ids"):
        TrainingGroup([], [], "g7")
