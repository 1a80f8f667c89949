"""The tables of tiles say of every pair of tokens what the ends of the subtrees say."""

from __future__ import annotations

import torch
from hypothesis import given
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.trainer.algorithm.shapes import fast, groups_of_many_shapes
from tests.trainer.tiny import random_trees
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.algorithm.tree_mask import TILE, TreeMask, tiles

TABLES = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def pairs(ends: Tensor) -> Tensor:
    """Return which token sees which, [T, T] bool."""
    rows = torch.arange(len(ends))
    return (rows <= rows[:, None]) & (rows[:, None] < ends)


@fast
@given(groups=groups_of_many_shapes(most=4))
def test_a_token_sees_what_it_sees_on_a_cpu(groups: list[TrainingGroup]) -> None:
    groups = [g for g in groups if g.sequences]
    mask = pack(groups, TreeMask).layout.prepared()
    expected = pairs(pack(groups).layout.ends)
    rows, zero = torch.arange(len(expected)), torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, rows[:, None], rows), expected)


def test_tiles_are_those_of_the_whole_mask() -> None:
    for seed, n_groups in enumerate((1, 4, 5, 12, 40)):
        layout = pack(random_trees(seed, n_groups=n_groups, n_sequences=5), TreeMask).layout
        mask, length = layout.prepared(), len(layout.ends)
        expected = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
        for name in TABLES:
            counts, own = getattr(expected, name), getattr(mask, name)
            indices = name.replace("num_blocks", "indices")
            assert torch.equal(own, counts), name
            for row, count in enumerate(counts[0, 0].tolist()):
                first = [getattr(m, indices)[0, 0, row, :count].tolist() for m in (mask, expected)]
                assert first[0] == first[1], name


def test_tokens_that_see_little_ask_for_few_tiles() -> None:
    alone = torch.arange(1, 16 * TILE + 1)
    partial, whole = tiles(alone)
    assert int(partial.sum()) == 16
    assert not whole.any()
    partial, whole = tiles(torch.full_like(alone, len(alone)))
    assert (int(partial.sum()), int(whole.sum())) == (16, 15 * 16 // 2)
