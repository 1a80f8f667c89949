"""The order of attention in a micro-batch: which packed tokens see which, from one integer a token.

The tokens of a micro-batch are trees in depth-first order (see packing.py). ``ends[k]`` is the packed index at which
the subtree of token k ends, and token q sees token k exactly if k <= q < ends[k].

On a CPU, ``AttentionLayout`` orders attention by run. A *run* is a longest stretch of the row in which every token is
the child of the one before it. What a run's tokens see is a path: the ancestors of its first token, then the run
itself, as far as the token. So attention is computed by run, with the keys of its path, and runs of similar size share
one call. A prompt with completions has the run of the prompt with the first completion, and one for each other
completion. For layers with a sliding window, long runs are cut, and of a path there is only what the window reaches:
the distance of two tokens is that of their places on the path, whatever lies between them in the row.

On CUDA, ``TreeMask`` has tables of tiles for ``flex_attention``. Over tiles of 128 queries and 128 keys the order says
which tiles hold pairs to compute, and which of these hold nothing else. A kernel visits the former and asks for single
pairs only outside the latter. So neither a mask of T x T numbers exists, nor copies of keys and values.

``PathRows`` is for models whose layers mix tokens in ways of their own: each path of a tree is a row, which the model's
own forward pass reads. What paths share is computed once for each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.utils.rnn import pad_sequence

ALIGNMENT = 8
"""Keys of a block with a mask are a multiple of it, so that every row of a float32 mask fills vector registers."""

LEAST_OWN, LEAST_SEEN = 32, 64
"""Shorter runs and paths are padded together: the padding costs less than another call."""

LONGEST_PART = 1024
"""Most tokens of a part of a run, where a window cuts it; with more, too many keys would be computed and hidden."""


@dataclass(frozen=True)
class Block:
    """R runs whose attention is one call: at most Q tokens, which see at most K; rows are padded with index 0."""

    query_rows: Tensor
    """[R, Q] int64: packed index of each token of the runs."""
    key_rows: Tensor
    """[R, K] int64: packed index of each token on the runs' paths."""
    depths: Tensor
    """[R, Q] int64: the place of each token on its path, or on what the window reaches of it."""
    is_causal: bool
    """The runs begin at roots and fit into the window, so query and key are the same rows, and no mask is needed."""
    mask: Tensor | None = None
    """[R, 1, Q, K]: numbers to add to the scores, 0 and -inf; None before ``prepared``, and for causal runs."""
    window: int | None = None
    """The tokens of its path that a token sees, itself included; None for all of them."""

    def with_mask(self) -> Block:
        """Return a copy with its mask."""
        if self.is_causal:
            return self
        is_hidden = hidden(self.depths, self.key_rows.shape[1], self.window)
        return replace(self, mask=torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf))


def hidden(depths: Tensor, keys: int, window: int | None) -> Tensor:
    """Return which of the keys of its run a query does not see, [R, 1, Q, K] bool; see ``Block`` for the arguments."""
    # Padding comes after the path, at places greater than any depth.
    distances = depths[:, None, :, None] - torch.arange(keys)
    is_hidden = distances < 0
    return is_hidden if window is None else is_hidden.logical_or_(distances >= window)


@dataclass(frozen=True)
class AttentionLayout:
    """The trees of T packed tokens, and the blocks in which their attention is computed."""

    ends: Tensor
    """[T] int64: packed index at which the subtree of each token ends."""
    blocks: tuple[Block, ...]
    unpack: Tensor
    """[T] int64: index of each packed token among the queries of all blocks, one after the other."""

    @staticmethod
    def row_length(tokens: int, parts: int = 1) -> int:
        """Return the length of a row with this number of tokens in equal parts: no padding for one part."""
        return -(-tokens // parts) * parts

    @classmethod
    def of(cls, ends: Tensor, window: int | None = None) -> AttentionLayout:
        """Return the layout of trees in depth-first order.

        Args:
            ends: [T] int64 on the CPU; the packed index at which the subtree of each token ends.
            window: the tokens of its path that a token sees, itself included; by default all of them.
        """
        by_size: dict[tuple[bool, int, int], list[tuple[Tensor, int]]] = defaultdict(list)
        for path, own in runs(ends) if window is None else _within(window, runs(ends)):
            is_causal = own == len(path) <= (window or len(path))
            by_size[is_causal, _size_class(len(path), LEAST_SEEN), _size_class(own, LEAST_OWN)].append((path, own))
        blocks: list[Block] = []
        unpack, start = torch.empty_like(ends), 0
        for (is_causal, _, _), alike in sorted(by_size.items()):
            block = _block(alike, is_causal, window)
            n_runs, longest = block.query_rows.shape
            for number, (path, own) in enumerate(alike):
                first = start + number * longest
                unpack[path[-own:]] = torch.arange(first, first + own)
            start += n_runs * longest
            blocks.append(block)
        return cls(ends, tuple(blocks), unpack)

    def prepared(self, windows: Iterable[int | None] = (None,)) -> dict[int | None, AttentionLayout]:
        """Return the layout for each window, with the blocks' masks as float32 numbers, as attention is computed.

        Attention would otherwise convert a bool mask in every layer, and keep each result for the backward pass.
        """

        def with_masks(layout: AttentionLayout) -> AttentionLayout:
            return replace(layout, blocks=tuple(block.with_mask() for block in layout.blocks))

        whole, longest = with_masks(self), max(int(block.depths.max()) for block in self.blocks) + 1
        return {w: whole if w is None or w >= longest else with_masks(self.of(self.ends, w)) for w in windows}


def runs(ends: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the path of each run, [K] packed indices, and the number of its tokens."""
    following = torch.arange(1, len(ends))
    starts = [0, *following[ends[:-1] <= following].tolist()]
    path = torch.arange(0)
    for start, stop in zip(starts, [*starts[1:], len(ends)], strict=True):
        path = torch.cat([path[ends[path] > start], torch.arange(start, stop)])
        yield path, stop - start


def _within(window: int, whole: Iterable[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    """Yield runs in parts about as long as the window, each with what its tokens see of the path before it."""
    longest = min(max(window, LEAST_SEEN), LONGEST_PART)
    for path, own in whole:
        for start in range(len(path) - own, len(path), longest):
            part = path[max(0, start + 1 - window) : start + longest]
            yield part, min(longest, len(path) - start)


def _size_class(length: int, least: int) -> int:
    """Return a number that two lengths share only if the greater is at most ``least`` or twice the other."""
    return (max(length, least) - 1).bit_length()


def _block(runs: Sequence[tuple[Tensor, int]], is_causal: bool, window: int | None) -> Block:
    key_rows = pad_sequence([path for path, _ in runs], batch_first=True)
    if is_causal:
        query_rows = key_rows
    else:
        query_rows = pad_sequence([path[-own:] for path, own in runs], batch_first=True)
        key_rows = torch.nn.functional.pad(key_rows, (0, -key_rows.shape[1] % ALIGNMENT))
    depths = pad_sequence([torch.arange(len(path) - own, len(path)) for path, own in runs], batch_first=True)
    return Block(query_rows, key_rows, depths, is_causal, window=window)


@dataclass(frozen=True)
class PathRows:
    """The paths of the trees of T packed tokens as R rows of L tokens, padded on the right with the token at 0."""

    ends: Tensor
    """[T] int64: packed index at which the subtree of each token ends."""
    paths: Tensor
    """[R, L] int64: packed index of each token on each path."""
    lengths: Tensor
    """[R] int64: the tokens of each path."""
    places: Tensor
    """[T] int64: index of each packed token in the rows, one after the other, where it comes first."""

    row_length = staticmethod(AttentionLayout.row_length)

    @classmethod
    def of(cls, ends: Tensor) -> PathRows:
        """Return the rows of trees in depth-first order; ``ends`` [T] int64 is on the CPU."""
        paths = [path for path, _ in runs(ends)]
        rows = pad_sequence(paths, batch_first=True)
        places = torch.empty_like(ends)
        for number, path in reversed(list(enumerate(paths))):
            places[path] = torch.arange(len(path)) + number * rows.shape[1]
        return cls(ends, rows, torch.tensor([len(path) for path in paths]), places)

    def each(self, change: Callable[[Tensor], Tensor]) -> PathRows:
        """Return a copy with every tensor changed, such as moved to a device."""
        return PathRows(*(change(x) for x in (self.ends, self.paths, self.lengths, self.places)))

    def mask(self) -> Tensor:
        """Return which tokens of the rows are no padding, [R, L] int64, as transformers' models take it."""
        places = torch.arange(self.paths.shape[1], device=self.paths.device)
        return (places < self.lengths[:, None]).long()


TILE = 128
"""Queries and keys of a tile, as ``flex_attention`` has them by default."""


@dataclass(frozen=True)
class TreeMask:
    """The trees of T packed tokens, as ``flex_attention`` needs them."""

    ends: Tensor
    """[T] int32: packed index at which the subtree of each token ends."""
    depths: Tensor
    """[T] int32: the tokens before each on its path."""
    tables: tuple[Tensor, ...]
    """The tables of a BlockMask for full attention, int32: counts [1, 1, B] and tiles [1, 1, B, B] of keys by query
    tile, first for tiles that are seen in part, then for those seen whole; then the same of queries by key tile."""

    @staticmethod
    def row_length(tokens: int, parts: int = 1) -> int:
        """Return the length of a row with this number of tokens: whole tiles in each equal part, at least two.

        So a compiled layer has one graph for rows of all lengths. A row of one token, of one tile, or with a tile in
        part would each have a graph of its own.
        """
        return TILE * parts * max(2, -(-tokens // (TILE * parts)))

    @classmethod
    def of(cls, ends: Tensor) -> TreeMask:
        """Return the mask of trees in depth-first order; ``ends`` [T] int64 is on the CPU."""
        return cls(ends.int(), depths_of(ends).int(), _tables(ends))

    def each(self, change: Callable[[Tensor], Tensor]) -> TreeMask:
        """Return a copy with every tensor changed, such as moved to a device."""
        return TreeMask(change(self.ends), change(self.depths), tuple(change(table) for table in self.tables))

    def prepared(self, windows: Iterable[int | None] = (None,)) -> dict[int | None, BlockMask]:
        """Return the mask of each window for ``flex_attention``, on the device of the tables."""
        return {window: self._mask(window) for window in windows}

    def _mask(self, window: int | None) -> BlockMask:
        ends = self.ends

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        make = partial(cast("Callable[..., BlockMask]", BlockMask), (len(ends), len(ends)))
        if window is None:
            return make(*self.tables, BLOCK_SIZE=(TILE, TILE), mask_mod=sees)
        depths, farthest = self.depths, self.depths - window

        def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(batch, head, query, key) & (depths[key] > farthest[query])

        return make(*_tables(ends, depths, window), BLOCK_SIZE=(TILE, TILE), mask_mod=sees_near)


def depths_of(ends: Tensor) -> Tensor:
    """Return how many tokens are before each on its path, [T], from the ends of the tokens' subtrees, [T] int64."""
    rows = torch.arange(len(ends))
    # Of the tokens before it, those whose subtrees have ended are not on the path.
    return rows - torch.searchsorted(ends.sort().values, rows, right=True)


def tiles(ends: Tensor, depths: Tensor | None = None, window: int = 0) -> tuple[Tensor, Tensor]:
    """Return the tiles that hold pairs to compute besides others, and those that hold nothing else.

    With a window, the former may have tiles without a pair: those that the depths of their tokens do not exclude.

    Args:
        ends: [T], the packed index at which the subtree of each token ends.
        depths: [T], see ``TreeMask``; only with a window.
        window: the tokens of its path that a token sees, itself included; by default all of them.

    Returns:
        Two [B, B] bool for B = ceil(T / TILE): query tile by key tile.
    """
    count = -(-len(ends) // TILE)

    def bounds(numbers: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.nn.functional.pad(numbers, (0, count * TILE - len(ends))).view(count, TILE)
        return padded.amax(1), padded.amin(1)

    latest, earliest = bounds(ends)
    first = torch.arange(count, device=ends.device)[:, None] * TILE
    end = (first + TILE).clamp(max=len(ends))
    is_before = torch.ones(count, count, dtype=torch.bool, device=ends.device).tril(-1)
    # Of a tile of keys before it, a tile of queries sees anything exactly if its first query does.
    is_seen = is_before & (latest > first) | torch.eye(count, dtype=torch.bool, device=ends.device)
    is_whole = is_before & (earliest >= end)
    if depths is not None:
        deepest, highest = bounds(depths)
        is_seen &= highest[:, None] - deepest < window
        is_whole &= deepest[:, None] - highest < window
    return is_seen & ~is_whole, is_whole


def _tables(ends: Tensor, depths: Tensor | None = None, window: int = 0) -> tuple[Tensor, ...]:
    """Return the tables of a BlockMask; see ``TreeMask``, and ``tiles`` for the arguments."""
    some, whole = tiles(ends, depths, window)
    return tuple(table for seen in (some, whole, some.T, whole.T) for table in _table(seen))


def _table(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles each row of [B, B] bool has, [1, 1, B], and their numbers in front, [1, 1, B, B]."""
    counts, before = seen.sum(1), seen.cumsum(1)
    numbers = torch.arange(len(seen), device=seen.device).expand_as(before)
    places = torch.where(seen, before - 1, counts[:, None] + numbers - before)
    order = torch.empty_like(before).scatter_(1, places, numbers)
    return counts.int()[None, None], order.int()[None, None]
