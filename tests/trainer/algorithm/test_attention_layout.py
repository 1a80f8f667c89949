"""A token sees its ancestors and itself, said by one integer a token and by the blocks of attention alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.sequences import trained_sequence
from tests.trainer.algorithm.shapes import fast, groups_of_many_shapes, prefixes
from tests.trainer.tiny import random_trees
from trainer.algorithm import attention_layout
from trainer.algorithm.attention_layout import TILE, AttentionLayout, TreeMask, tiles
from trainer.algorithm.packing import TrainingGroup, pack

WINDOWS = st.none() | st.integers(1, 20)


@fast
@given(groups=groups_of_many_shapes(most=4))
def test_a_token_sees_its_own_past_and_its_position_is_its_depth(groups: list[TrainingGroup]) -> None:
    groups = [g for g in groups if g.sequences]
    if not groups:
        return
    batch = pack(groups)
    pasts = {prefix[-1]: list(prefix) for group in groups for prefix in prefixes(group)}
    rows, ends = torch.arange(len(batch.input_ids)), batch.layout.ends
    for q, token in enumerate(batch.input_ids.tolist()):
        assert batch.input_ids[(rows <= q) & (q < ends)].tolist() == pasts[token]
    assert batch.position_ids.tolist() == [len(pasts[token]) - 1 for token in batch.input_ids.tolist()]


@fast
@given(groups=groups_of_many_shapes(most=4), window=WINDOWS)
def test_the_blocks_of_attention_show_each_token_what_the_ends_say(
    groups: list[TrainingGroup], window: int | None
) -> None:
    groups = [g for g in groups if g.sequences]
    if not groups:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_layout, "LONGEST_PART", 8)
        layout = pack(groups).layout.prepared((window,))[window]
    queries, shown = [], []
    for block in layout.blocks:
        n_runs, longest, keys = *block.query_rows.shape, block.key_rows.shape[1]
        mask = block.mask
        if mask is None:
            assert block.is_causal
            mask = torch.full((longest, keys), -torch.inf).triu(1).expand(n_runs, 1, -1, -1)
        assert mask.shape == (n_runs, 1, longest, keys)
        for run, rows in enumerate(block.query_rows.tolist()):
            for place, row in enumerate(rows):
                queries.append(row)
                shown.append(block.key_rows[run][mask[run, 0, place] == 0].tolist())
    every = torch.arange(len(layout.ends))
    assert [queries[i] for i in layout.unpack.tolist()] == every.tolist()
    for q, i in enumerate(layout.unpack.tolist()):
        path = ((every <= q) & (q < layout.ends)).nonzero().squeeze(1).tolist()
        assert shown[i] == (path if window is None else path[-window:])


def group_of(prompt: int, lengths: list[int]) -> TrainingGroup:
    """Return a group whose completions share nothing but the prompt."""
    return TrainingGroup(
        [0] * prompt, [trained_sequence([i] * n, [0.0] * n, [1.0] * n) for i, n in enumerate(lengths, start=1)]
    )


def padded_pairs(layout: AttentionLayout) -> int:
    return sum(block.query_rows.numel() * block.key_rows.shape[1] for block in layout.blocks)


def test_one_long_completion_does_not_pad_many_short_ones() -> None:
    layout = pack([group_of(150, [4096] + [100] * 120)]).layout
    assert padded_pairs(layout) < 1.1 * (4245**2 + 120 * 99 * 256)
    assert sum(block.key_rows.numel() for block in layout.blocks) < 1.1 * (4245 + 120 * 256)


TABLES = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def pairs(ends: Tensor, window: int | None = None) -> Tensor:
    """Return which token sees which, [T, T] bool."""
    rows = torch.arange(len(ends))
    on_path = (rows <= rows[:, None]) & (rows[:, None] < ends)
    # Of the tokens that a token sees, those after one that it sees are nearer.
    return on_path if window is None else on_path & (on_path.flip(1).cumsum(1).flip(1) <= window)


@fast
@given(groups=groups_of_many_shapes(most=4), window=WINDOWS)
def test_a_token_sees_what_it_sees_on_a_cpu(groups: list[TrainingGroup], window: int | None) -> None:
    groups = [g for g in groups if g.sequences]
    mask = pack(groups, TreeMask).layout.prepared((window,))[window]
    expected = pairs(pack(groups, TreeMask).layout.ends, window)
    rows, zero = torch.arange(len(expected)), torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, rows[:, None], rows), expected)


def test_tiles_are_those_of_the_whole_mask() -> None:
    for seed, n_groups in enumerate((1, 4, 5, 12, 40)):
        layout = pack(random_trees(seed, n_groups=n_groups, n_sequences=5), TreeMask).layout
        mask, length = layout.prepared()[None], len(layout.ends)
        expected = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
        for name in TABLES:
            counts, own = getattr(expected, name), getattr(mask, name)
            indices = name.replace("num_blocks", "indices")
            assert torch.equal(own, counts), name
            for row, count in enumerate(counts[0, 0].tolist()):
                first = [getattr(m, indices)[0, 0, row, :count].tolist() for m in (mask, expected)]
                assert first[0] == first[1], name


@pytest.mark.parametrize("window", [1, 2, 6, 130, 200])
def test_tiles_of_a_window_are_few_and_hold_every_pair(window: int) -> None:
    layout = pack([group_of(1000, [300] * 8)], TreeMask).layout
    count = len(layout.ends) // TILE
    by_tile = pairs(layout.ends, window).view(count, TILE, count, TILE)
    partial, whole = tiles(layout.ends, layout.depths, window)
    assert not (by_tile.any(3).any(1) & ~partial & ~whole).any()
    assert not (whole & ~by_tile.all(3).all(1)).any()
    # A tile of queries reaches over one more than the window has, and a completion begins after the prompt's end.
    assert int((partial | whole).sum()) <= count * (4 + 2 * (window // TILE))


def test_tokens_that_see_little_ask_for_few_tiles() -> None:
    alone = torch.arange(1, 16 * TILE + 1)
    partial, whole = tiles(alone)
    assert int(partial.sum()) == 16
    assert not whole.any()
    partial, whole = tiles(torch.full_like(alone, len(alone)))
    assert (int(partial.sum()), int(whole.sum())) == (16, 15 * 16 // 2)
