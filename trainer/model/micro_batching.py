"""Micro-batches: groups shared among ranks, for an optimizer step or to compute a number of every trained token.

A group is shared in pieces, each a prompt with some of the group's completions. A group that is too large for a
micro-batch is cut between branches of its prefix tree; each piece repeats the tokens that it shares with the pieces
before. With LAYOUT=rows a piece is one completion, and a micro-batch has those of similar lengths.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate, compress, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.protocol.base import derive_seed
from trainer.algorithm.attention_layout import AttentionLayout, PathRows, TreeMask
from trainer.algorithm.loss import StepSize
from trainer.algorithm.packing import Branch, Context, MicroBatch, Order, TrainingGroup, pack
from trainer.algorithm.teachers import is_taught
from trainer.algorithm.training_groups import PerToken
from trainer.config import TrainerSettings
from trainer.model.ranks import Ranks

KEYS_PER_TOKEN = 4
"""Most keys in attention on a CPU for each token of the budget, before padding, which at most doubles them. Every
branch gets a copy of the keys and values of its path there, so the memory of attention depends on this number. On CUDA
nothing is copied, and a group is cut only where it exceeds the tokens."""


@dataclass(frozen=True)
class _Size:
    """The size of branches or pieces packed together, or the most that a micro-batch holds."""

    tokens: int = 0
    keys: float = 0

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> _Size:
        """Return the size of branches that follow one another in depth-first order."""
        return reduce(_Size.with_branch, branches, cls())

    def with_branch(self, branch: Branch) -> _Size:
        """Return the size with one more branch; the first one shares nothing."""
        new = branch.new if self.tokens else branch.length
        return self + _Size(new, branch.length if new else 0)

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.tokens + other.tokens, self.keys + other.keys)

    def fits(self, limit: _Size) -> bool:
        return self.tokens <= limit.tokens and self.keys <= limit.keys


def share_out(
    groups: Sequence[TrainingGroup], n_ranks: int, max_tokens: int, device: str = "cpu", pieces_per_rank: int = 1
) -> list[list[list[TrainingGroup]]]:
    """Share groups among ranks and micro-batches: ``result[rank][micro_batch]`` is a list of pieces.

    Every rank gets the same number of micro-batches (some may be empty). Each has at most ``max_tokens`` tokens and, on
    a CPU, ``KEYS_PER_TOKEN`` times as many keys in attention; a completion beyond that gets a micro-batch of its own.
    The same groups are always shared in the same way.

    Args:
        groups: the groups to train on.
        n_ranks: the number of ranks.
        max_tokens: tokens in one micro-batch.
        device: the ranks' type of device, ``cpu`` or ``cuda``.
        pieces_per_rank: the least pieces for each of several ranks.
    """
    limit = _Size(max_tokens, KEYS_PER_TOKEN * max_tokens if device == "cpu" else math.inf)
    pieces = [piece for group in groups for piece in _split(group, limit)]
    # With fewer pieces than ranks, halve the largest piece: an idle rank costs more than a second copy of the prompt.
    least = n_ranks * pieces_per_rank if n_ranks > 1 else 1
    while len(pieces) < least:
        divisible = [piece for piece in pieces if len(piece.sequences) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda piece: piece.tokens)
        pieces.remove(largest)
        pieces += _halve(largest)
    return _equally_many([_fill(own, limit) for own in _balance(pieces, n_ranks)])


MOST_PADDING = 0.15
"""Most padding in a micro-batch of rows, a share of its tokens."""


def share_out_rows(groups: Sequence[TrainingGroup], n_ranks: int, max_tokens: int) -> list[list[list[TrainingGroup]]]:
    """Share groups as ``share_out`` does, each completion a row of its own, padded to the longest of its micro-batch.

    Args:
        groups: the groups to train on.
        n_ranks: the number of ranks.
        max_tokens: tokens in one micro-batch, padding included, unless one completion has more.
    """
    pieces = [_piece(group, [branch]) for group in groups for branch in group.branches]
    filled = []
    for own in _balance(pieces, n_ranks):
        batches: list[list[TrainingGroup]] = []
        tokens = longest = 0
        for piece in sorted(own, key=lambda piece: piece.tokens, reverse=True):
            padded = longest * (len(batches[-1]) + 1) if batches else math.inf
            tokens += piece.tokens
            if padded > max_tokens or tokens < (1 - MOST_PADDING) * padded:
                batches.append([])
                tokens = longest = piece.tokens
            batches[-1].append(piece)
        filled.append(batches)
    return _equally_many(filled)


def _equally_many(filled: list[list[list[TrainingGroup]]]) -> list[list[list[TrainingGroup]]]:
    """Return the ranks' micro-batches with empty ones after them, equally many on each rank."""
    most = max(len(batches) for batches in filled)
    return [batches + [[] for _ in range(most - len(batches))] for batches in filled]


def _shares(
    groups: Sequence[TrainingGroup], max_tokens: int, ranks: Ranks, pieces_per_rank: int = 1
) -> list[list[list[TrainingGroup]]]:
    """Return how the context groups share ``groups``; each of a group's ranks computes ``max_tokens`` at once."""
    if ranks.has_rows:
        return share_out_rows(groups, ranks.n_shares, max_tokens)
    return share_out(groups, ranks.n_shares, max_tokens * ranks.context.size, ranks.device.type, pieces_per_rank)


def _split(group: TrainingGroup, limit: _Size) -> list[TrainingGroup]:
    """Cut a group that exceeds the budget; a piece ends, in its second half, where the next one repeats least."""
    branches = group.branches
    if _Size.of(branches).fits(limit):
        return [group] if branches else []
    pieces: list[TrainingGroup] = []
    while branches:
        sizes = accumulate(branches, _Size.with_branch, initial=_Size())
        count = max(1, sum(1 for _ in takewhile(lambda size: size.fits(limit), sizes)) - 1)
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
    whole = group.cut_from or group.trained_tokens
    return replace(group, sequences=[branch.sequence for branch in branches], cut_from=whole)


def _balance(pieces: list[TrainingGroup], n_ranks: int) -> list[list[TrainingGroup]]:
    """Give each piece, the longest first, to the rank with the fewest tokens so far."""
    loads = [0] * n_ranks
    by_rank: list[list[TrainingGroup]] = [[] for _ in range(n_ranks)]
    for piece in sorted(pieces, key=lambda piece: piece.tokens, reverse=True):
        rank = loads.index(min(loads))
        by_rank[rank].append(piece)
        loads[rank] += piece.tokens
    return by_rank


def _fill(pieces: list[TrainingGroup], limit: _Size) -> list[list[TrainingGroup]]:
    """Fill micro-batches by first fit, the largest pieces first."""
    batches: list[list[TrainingGroup]] = []
    sizes: list[_Size] = []
    for piece in sorted(pieces, key=lambda piece: piece.tokens, reverse=True):
        size = _Size.of(piece.branches)
        for i, used in enumerate(sizes):
            if (used + size).fits(limit):
                batches[i].append(piece)
                sizes[i] = used + size
                break
        else:
            batches.append([piece])
            sizes.append(size)
    return batches


@dataclass(frozen=True)
class Part:
    """This rank's part of one optimizer step."""

    micro_batches: list[list[TrainingGroup]]
    """This rank's micro-batches, not yet packed."""
    size: StepSize
    tokens: int
    """Tokens that all ranks read."""


def make_part(
    groups: Sequence[TrainingGroup],
    trainable: Sequence[TrainingGroup],
    max_tokens: int,
    ranks: Ranks,
    *,
    pieces_per_rank: int = 1,
) -> Part:
    """Return this rank's part of an optimizer step, which is empty without a token to train on.

    Args:
        groups: the groups of the step, which the loss's denominators count.
        trainable: those of them that are computed, unless all of their tokens are masked.
        max_tokens: a rank's tokens in one micro-batch.
        ranks: all ranks.
        pieces_per_rank: see ``share_out``.
    """
    computed = [group for group in trainable if group.trained_tokens]
    shares = _shares(computed, max_tokens, ranks, pieces_per_rank)
    return Part(
        micro_batches=shares[ranks.share],
        size=StepSize(
            tokens=sum(g.trained_tokens for g in groups),
            sequences=sum(s.trained_tokens > 0 for g in groups for s in g.sequences),
            taught=sum(s.trained_tokens for g in groups for s in g.sequences if is_taught(s)),
            groups=sum(g.trained_tokens > 0 for g in groups),
        ),
        tokens=sum(piece.tokens for batches in shares for pieces in batches for piece in pieces),
    )


def part_order(settings: TrainerSettings, step: int) -> list[int]:
    """Return the numbers of a batch's parts in the order of a step's updates.

    The first pass takes them in order; each further one of EPOCHS_PER_BATCH by an order drawn from (SEED, step, pass).
    """
    parts = range(settings.updates_per_batch)
    seeds = (derive_seed(settings.seed, "parts", step, number) for number in range(1, settings.epochs_per_batch))
    return [*parts, *(i for seed in seeds for i in random.Random(seed).sample(parts, len(parts)))]


def in_waves(groups: Sequence[TrainingGroup], sizes: Sequence[int]) -> list[Sequence[TrainingGroup]]:
    """Return the groups of each wave of a step, whose ``sizes`` are in the order of the groups."""
    return [groups[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def packed(parts: Iterable[Sequence[TrainingGroup]], ranks: Ranks) -> Iterator[MicroBatch]:
    """Yield micro-batches on this rank's device, which holds one at a time, each packed from its pieces.

    On a CPU each is packed when its turn comes. On CUDA a thread packs the next one while the device computes, and the
    host waits neither for the packing nor for the copy.
    """
    trees = AttentionLayout if ranks.device.type == "cpu" else TreeMask
    order = PathRows if ranks.has_rows else trees
    if ranks.device.type == "cpu":
        yield from map(partial(pack, order=order, context=ranks.context), parts)
        return
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(ranks.device,)) as thread:
        waiting = deque(parts)
        ahead = deque([thread.submit(_pinned, waiting.popleft(), order, ranks.context)] if waiting else [])
        while ahead:
            batch = ahead.popleft().result()
            if waiting:
                ahead.append(thread.submit(_pinned, waiting.popleft(), order, ranks.context))
            yield batch.to(ranks.device)


def _pinned(pieces: Sequence[TrainingGroup], order: Order, context: Context) -> MicroBatch:
    return pack(pieces, order, context).pinned()


def unknown_ids(group: TrainingGroup, vocabulary: int) -> NDArray[np.int64]:
    """Return the group's token ids that are not below ``vocabulary``."""
    ids = group.all_ids()
    return ids[(ids < 0) | (ids >= vocabulary)]


@torch.no_grad()
def token_numbers(
    groups: Sequence[TrainingGroup],
    compute: Callable[[MicroBatch], Tensor],
    max_tokens: int,
    vocabulary: int,
    ranks: Ranks,
) -> list[PerToken]:
    """Return a number of every trained token by group, completion and token, on every rank. A collective.

    Args:
        groups: the groups; the ranks share them. Those with token ids outside the vocabulary get zeros.
        compute: from a micro-batch to one number for each of its N trained tokens, [N].
        max_tokens: tokens in one micro-batch.
        vocabulary: the number of token ids that the model knows.
        ranks: all ranks.
    """
    is_known = [not len(unknown_ids(group, vocabulary)) for group in groups]
    shares = _shares(list(compress(groups, is_known)), max_tokens, ranks)
    # Queue all passes before the first read, so that the GPU never waits for the host.
    computed = [compute(batch) for batch in packed(shares[ranks.share], ranks)]
    # A filler, which computes one token of no group, only keeps the ranks in step.
    computed_here = [values.cpu() for pieces, values in zip(shares[ranks.share], computed, strict=True) if pieces]
    numbers: dict[int, NDArray[np.float64]] = {}
    # Every rank of a context group has the same.
    by_share = ranks.gather_vectors(torch.cat([torch.empty(0), *computed_here]))[:: ranks.context.size]
    for share, values in zip(shares, by_share, strict=True):
        sequences = [s for pieces in share for piece in pieces for s in piece.sequences]
        parts = values.split([s.trained_tokens for s in sequences]) if sequences else ()
        numbers |= {id(s): part.double().numpy() for s, part in zip(sequences, parts, strict=True)}
    return [
        [numbers[id(s)] if known else np.zeros(s.trained_tokens) for s in group.sequences]
        for group, known in zip(groups, is_known, strict=True)
    ]
