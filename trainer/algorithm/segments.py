"""The order of recurrent layers in a micro-batch: where each stretch of tokens begins, and whose state it begins from.

A *segment* is a longest stretch of the packed row without a branch: each of its tokens is the only child of the one
before it, so ``ends`` is the same number for all of them. A recurrent layer computes the segments of one depth of the
trees together, each from the state after its parent's last token; roots begin from zeros. Segments of similar lengths
share one call, as rows padded on the right.

A causal convolution needs no depths: it reads one row, in which the last inputs of its path precede each segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

HISTORY = 3
"""Inputs of the path that precede a segment in the row of a convolution: its kernel has at most one more."""

CHUNK = 64
"""Shorter segments are padded together, because kernels compute chunks of so many tokens anyway."""


@dataclass(frozen=True)
class Scan:
    """R segments of one depth, of at most L tokens, which one call computes."""

    rows: Tensor
    """[R, L] int64: packed index of each token; 0 for padding."""
    is_padding: Tensor
    """[R, L] bool."""
    parents: Tensor | None
    """[R] int64: the place of each parent among the segments of the depth before; None for roots."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Scan:
        """Return a copy with every tensor changed, such as moved to a device."""
        return Scan(change(self.rows), change(self.is_padding), None if self.parents is None else change(self.parents))


@dataclass(frozen=True)
class Segments:
    """The segments of the trees of T packed tokens."""

    depths: tuple[tuple[Scan, ...], ...]
    """The calls for each depth, roots first. The places of a depth's segments are in the order of its calls."""
    unpack: Tensor
    """[T] int64: index of each packed token among the rows of all calls, one after the other."""
    history: Tensor
    """[H] int64: packed index of each input in the row of a convolution; T for zeros before a root."""
    places: Tensor
    """[T] int64: index of each packed token in that row."""

    @classmethod
    def of(cls, ends: Tensor) -> Segments:
        """Return the segments of trees in depth-first order.

        Args:
            ends: [T] int64 on the CPU; the packed index at which the subtree of each token ends.
        """
        starts = [0, *(1 + (ends[1:] != ends[:-1]).nonzero()[:, 0]).tolist()]
        tokens = [torch.arange(*span) for span in zip(starts, [*starts[1:], len(ends)], strict=True)]
        parents = _parents(starts, ends[starts].tolist())
        depths: list[tuple[Scan, ...]] = []
        places_in_depth: dict[int, int] = {}
        unpack, used = torch.empty_like(ends), 0
        for of_depth in _by_depth(parents):
            by_size: dict[int, list[int]] = defaultdict(list)
            for number in of_depth:
                by_size[(max(len(tokens[number]), CHUNK) - 1).bit_length()].append(number)
            scans = []
            above, places_in_depth = places_in_depth, {n: i for i, n in enumerate(chain(*by_size.values()))}
            for alike in by_size.values():
                rows = pad_sequence([tokens[number] for number in alike], batch_first=True)
                lengths = torch.tensor([len(tokens[number]) for number in alike])
                is_padding = torch.arange(rows.shape[1]) >= lengths[:, None]
                unpack[rows[~is_padding]] = used + (~is_padding).flatten().nonzero()[:, 0]
                used += rows.numel()
                scans.append(
                    Scan(rows, is_padding, torch.tensor([above[parents[n]] for n in alike]) if above else None)
                )
            depths.append(tuple(scans))
        return cls(tuple(depths), unpack, *_convolution_row(tokens, parents, len(ends)))

    def each(self, change: Callable[[Tensor], Tensor]) -> Segments:
        """Return a copy with every tensor changed, such as moved to a device."""
        depths = tuple(tuple(scan.each(change) for scan in scans) for scans in self.depths)
        return Segments(depths, change(self.unpack), change(self.history), change(self.places))


def _parents(starts: list[int], ends: list[int]) -> list[int]:
    """Return the number of each segment's parent, -1 for roots, from where segments start and their subtrees end."""
    parents: list[int] = []
    path: list[int] = []
    for number, start in enumerate(starts):
        while path and ends[path[-1]] <= start:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(number)
    return parents


def _by_depth(parents: list[int]) -> list[list[int]]:
    """Return the numbers of the segments of each depth; a parent comes before its children."""
    depths: list[int] = []
    by_depth: dict[int, list[int]] = defaultdict(list)
    for number, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        by_depth[depths[number]].append(number)
    return [by_depth[depth] for depth in range(len(by_depth))]


def _convolution_row(tokens: list[Tensor], parents: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Return ``history`` and ``places`` of segments with these packed indices; see ``Segments``."""
    before_root = torch.full((HISTORY,), length)
    inputs: list[Tensor] = []
    for own, parent in zip(tokens, parents, strict=True):
        inputs.append(torch.cat([inputs[parent][-HISTORY:] if parent >= 0 else before_root, own]))
    history = torch.cat(inputs)
    is_own = torch.cat([torch.arange(len(row)) >= HISTORY for row in inputs])
    return history, is_own.nonzero()[:, 0]
