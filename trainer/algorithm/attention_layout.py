"""The order of attention in a micro-batch on a CPU: which packed tokens see which, from one integer a token.

The tokens of a micro-batch are trees in depth-first order (see packing.py). ``ends[k]`` is the packed index at which
the subtree of token k ends, and token q sees token k exactly if k <= q < ends[k].

A *run* is a longest stretch of the row in which every token is the child of the one before it. What a run's tokens see
is a path: the ancestors of its first token, then the run itself, as far as the token. So attention is computed by run,
with the keys of its path, and runs of similar size share one call. A prompt with completions has the run of the prompt
with the first completion, and one for each other completion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

ALIGNMENT = 8
"""Keys of a block with a mask are a multiple of it, so that every row of a float32 mask fills vector registers."""

LEAST_OWN, LEAST_SEEN = 32, 64
"""Shorter runs and paths are padded together: the padding costs less than another call."""


@dataclass(frozen=True)
class Block:
    """R runs whose attention is one call: at most Q tokens, which see at most K; rows are padded with index 0."""

    query_rows: Tensor
    """[R, Q] int64: packed index of each token of the runs."""
    key_rows: Tensor
    """[R, K] int64: packed index of each token on the runs' paths."""
    depths: Tensor
    """[R, Q] int64: the place of each token on its path."""
    is_causal: bool
    """The runs begin at roots, so query and key are the same rows, and no mask is needed."""
    mask: Tensor | None = None
    """[R, 1, Q, K]: numbers to add to the scores, 0 and -inf; None before ``prepared``, and for causal runs."""

    def with_mask(self) -> Block:
        """Return a copy with its mask."""
        if self.is_causal:
            return self
        # Padding comes after the path, at places greater than any depth.
        places = torch.arange(self.key_rows.shape[1])
        is_hidden = (places > self.depths[:, :, None])[:, None]
        mask = torch.zeros(is_hidden.shape)
        return replace(self, mask=mask.masked_fill_(is_hidden, -torch.inf))


@dataclass(frozen=True)
class AttentionLayout:
    """The trees of T packed tokens, and the blocks in which their attention is computed."""

    ends: Tensor
    """[T] int64: packed index at which the subtree of each token ends."""
    blocks: tuple[Block, ...]
    unpack: Tensor
    """[T] int64: index of each packed token among the queries of all blocks, one after the other."""

    @classmethod
    def of(cls, ends: Tensor) -> AttentionLayout:
        """Return the layout of trees in depth-first order.

        Args:
            ends: [T] int64 on the CPU; the packed index at which the subtree of each token ends.
        """
        by_size: dict[tuple[bool, int, int], list[tuple[Tensor, int]]] = defaultdict(list)
        for path, own in runs(ends):
            is_causal = own == len(path)
            by_size[is_causal, _size_class(len(path), LEAST_SEEN), _size_class(own, LEAST_OWN)].append((path, own))
        blocks: list[Block] = []
        unpack, start = torch.empty_like(ends), 0
        for (is_causal, _, _), alike in sorted(by_size.items()):
            block = _block(alike, is_causal)
            n_runs, longest = block.query_rows.shape
            for number, (path, own) in enumerate(alike):
                first = start + number * longest
                unpack[path[-own:]] = torch.arange(first, first + own)
            start += n_runs * longest
            blocks.append(block)
        return cls(ends, tuple(blocks), unpack)

    def prepared(self) -> AttentionLayout:
        """Return a copy with the blocks' masks as float32 numbers, the type that attention is computed in.

        Attention would otherwise convert a bool mask in every layer, and keep each result for the backward pass.
        """
        return replace(self, blocks=tuple(block.with_mask() for block in self.blocks))


def runs(ends: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the path of each run, [K] packed indices, and how many of its tokens are the run's own."""
    following = torch.arange(1, len(ends))
    starts = [0, *following[ends[:-1] <= following].tolist()]
    path = torch.arange(0)
    for start, stop in zip(starts, [*starts[1:], len(ends)], strict=True):
        path = torch.cat([path[ends[path] > start], torch.arange(start, stop)])
        yield path, stop - start


def _size_class(length: int, least: int) -> int:
    """Return a number that two lengths share only if the greater is at most ``least`` or twice the other."""
    return (max(length, least) - 1).bit_length()


def _block(runs: Sequence[tuple[Tensor, int]], is_causal: bool) -> Block:
    key_rows = pad_sequence([path for path, _ in runs], batch_first=True)
    if is_causal:
        query_rows = key_rows
    else:
        query_rows = pad_sequence([path[-own:] for path, own in runs], batch_first=True)
        key_rows = torch.nn.functional.pad(key_rows, (0, -key_rows.shape[1] % ALIGNMENT))
    depths = pad_sequence([torch.arange(len(path) - own, len(path)) for path, own in runs], batch_first=True)
    return Block(query_rows, key_rows, depths, is_causal)
