"""Sharing of groups among ranks and micro-batches, in pieces: a prompt with some of its group's completions.

A group that is too large for a micro-batch is cut between branches of its prefix tree; each piece repeats the tokens
that it shares with the pieces before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.algorithm.packing import Branch, TrainingGroup

KEYS_PER_TOKEN = 4
"""Most keys in attention for each token of the budget, before padding, which at most doubles them. Every branch gets a
copy of the keys and values of its path, so the memory of attention depends on this number."""


@dataclass(frozen=True)
class _Size:
    """The size of branches or pieces packed together."""

    tokens: int = 0
    keys: int = 0

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> _Size:
        """Return the size of branches that follow one another in depth-first order."""
        size = cls()
        for branch in branches:
            size = size.with_branch(branch)
        return size

    def with_branch(self, branch: Branch) -> _Size:
        """Return the size with one more branch; the first one shares nothing."""
        new = branch.new if self.tokens else branch.length
        return self + _Size(new, branch.length if new else 0)

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.tokens + other.tokens, self.keys + other.keys)

    def fits(self, max_tokens: int) -> bool:
        return self.tokens <= max_tokens and self.keys <= KEYS_PER_TOKEN * max_tokens


def share_out(groups: Sequence[TrainingGroup], n_ranks: int, max_tokens: int) -> list[list[list[TrainingGroup]]]:
    """Share groups among ranks and micro-batches: ``result[rank][micro_batch]`` is a list of pieces.

    Every rank gets the same number of micro-batches (some may be empty). Each has at most ``max_tokens`` tokens and
    ``KEYS_PER_TOKEN`` times as many keys in attention; a completion beyond that gets a micro-batch of its own. The same
    groups are always shared in the same way.

    Args:
        groups: the groups to train on.
        n_ranks: the number of ranks.
        max_tokens: tokens in one micro-batch.
    """
    pieces = [piece for group in groups for piece in _split(group, max_tokens)]
    # With fewer pieces than ranks, halve the largest piece: an idle rank costs more than a second copy of the prompt.
    while len(pieces) < n_ranks:
        divisible = [piece for piece in pieces if len(piece.sequences) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda piece: piece.tokens)
        pieces.remove(largest)
        pieces += _halve(largest)
    by_rank = _balance(pieces, n_ranks)
    filled = [_fill(own, max_tokens) for own in by_rank]
    most = max(len(batches) for batches in filled)
    return [batches + [[] for _ in range(most - len(batches))] for batches in filled]


def _split(group: TrainingGroup, max_tokens: int) -> list[TrainingGroup]:
    """Cut a group that exceeds the budget; a piece ends, in its second half, where the next one repeats least."""
    branches = group.branches
    if _Size.of(branches).fits(max_tokens):
        return [group] if branches else []
    pieces: list[TrainingGroup] = []
    while branches:
        size, count = _Size(), 0
        for branch in branches:
            size = size.with_branch(branch)
            if count and not size.fits(max_tokens):
                break
            count += 1
        if count < len(branches):
            places = range(count, count // 2, -1)
            count = min(places, key=lambda place: branches[place].shared)
        pieces.append(_piece(group, branches[:count]))
        branches = branches[count:]
    return pieces


def _halve(group: TrainingGroup) -> list[TrainingGroup]:
    """Cut a group in two, so that the larger piece has as few tokens as possible."""
    branches = group.branches
    cuts = []
    before, after = 0, group.tokens
    for place, branch in enumerate(branches[1:], start=1):
        before += branches[place - 1].new
        after -= branches[place - 1].new
        cuts.append((max(before, after + branch.shared), place))
    _, place = min(cuts)
    return [_piece(group, branches[:place]), _piece(group, branches[place:])]


def _piece(group: TrainingGroup, branches: Sequence[Branch]) -> TrainingGroup:
    return replace(group, sequences=[branch.sequence for branch in branches])


def _balance(pieces: list[TrainingGroup], n_ranks: int) -> list[list[TrainingGroup]]:
    """Give each piece, the longest first, to the rank with the fewest tokens so far."""
    loads = [0] * n_ranks
    by_rank: list[list[TrainingGroup]] = [[] for _ in range(n_ranks)]
    for piece in sorted(pieces, key=lambda piece: piece.tokens, reverse=True):
        rank = loads.index(min(loads))
        by_rank[rank].append(piece)
        loads[rank] += piece.tokens
    return by_rank


def _fill(pieces: list[TrainingGroup], max_tokens: int) -> list[list[TrainingGroup]]:
    """Fill micro-batches by first fit, the largest pieces first."""
    batches: list[list[TrainingGroup]] = []
    sizes: list[_Size] = []
    for piece in sorted(pieces, key=lambda piece: piece.tokens, reverse=True):
        size = _Size.of(piece.branches)
        for i, used in enumerate(sizes):
            if (used + size).fits(max_tokens):
                batches[i].append(piece)
                sizes[i] = used + size
                break
        else:
            batches.append([piece])
            sizes.append(size)
    return batches
