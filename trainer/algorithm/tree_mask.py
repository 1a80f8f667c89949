"""The order of attention in a micro-batch on CUDA: tables of tiles for ``flex_attention``.

The tokens of a micro-batch are trees in depth-first order (see packing.py): token q sees token k exactly if
k <= q < ends[k]. Over tiles of 128 queries and 128 keys this says which tiles hold pairs to compute, and which of these
hold nothing else. A kernel visits the former and asks for single pairs only outside the latter. So neither a mask of
T x T numbers exists, nor copies of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Queries and keys of a tile, as ``flex_attention`` has them by default."""


@dataclass(frozen=True)
class TreeMask:
    """The trees of T packed tokens, as ``flex_attention`` needs them."""

    ends: Tensor
    """[T] int32: packed index at which the subtree of each token ends."""
    tables: tuple[Tensor, ...]
    """The tables of a BlockMask, int32: counts [1, 1, B] and tiles [1, 1, B, B] of keys by query tile, first for tiles
    that are seen in part, then for those seen whole; then the same of queries by key tile."""

    @classmethod
    def of(cls, ends: Tensor) -> TreeMask:
        """Return the mask of trees in depth-first order; ``ends`` [T] int64 is on the CPU."""
        partial, whole = tiles(ends)
        tables = [table for seen in (partial, whole, partial.T, whole.T) for table in _table(seen.contiguous())]
        return cls(ends.int(), tuple(tables))

    def each(self, change: Callable[[Tensor], Tensor]) -> TreeMask:
        """Return a copy with every tensor changed, such as moved to a device."""
        return TreeMask(change(self.ends), tuple(change(table) for table in self.tables))

    def prepared(self) -> BlockMask:
        """Return the mask for ``flex_attention``, on the device of the tables."""
        ends = self.ends

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        make = cast("Callable[..., BlockMask]", BlockMask)
        return make((len(ends), len(ends)), *self.tables, BLOCK_SIZE=(TILE, TILE), mask_mod=sees)


def tiles(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tiles that hold pairs to compute besides others, and those that hold nothing else.

    Args:
        ends: [T] int64, the packed index at which the subtree of each token ends.

    Returns:
        Two [B, B] bool for B = ceil(T / TILE): query tile by key tile.
    """
    count = -(-len(ends) // TILE)
    padded = torch.nn.functional.pad(ends, (0, count * TILE - len(ends))).view(count, TILE)
    latest, earliest = padded.amax(1), padded.amin(1)
    first = torch.arange(count)[:, None] * TILE
    end = (first + TILE).clamp(max=len(ends))
    is_before = torch.ones(count, count, dtype=torch.bool).tril(-1)
    # Of a tile of keys before it, a tile of queries sees anything exactly if its first query does.
    is_seen = is_before & (latest > first) | torch.eye(count, dtype=torch.bool)
    is_whole = is_before & (earliest >= end)
    return is_seen & ~is_whole, is_whole


def _table(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles each row of [B, B] bool has, [1, 1, B], and their numbers in front, [1, 1, B, B]."""
    order = seen.int().argsort(dim=1, descending=True, stable=True)
    return seen.sum(1).int()[None, None], order.int()[None, None]
