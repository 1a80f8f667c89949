"""Groups shared among the ranks: for an optimizer step, and to compute a number of every trained token."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from services.protocol.base import derive_seed
from trainer.algorithm.loss import StepSize
from trainer.algorithm.packing import MicroBatch, TrainingGroup, pack
from trainer.algorithm.share_out import share_out
from trainer.algorithm.training_groups import TokenNumbers
from trainer.algorithm.tree_mask import TreeMask
from trainer.config import TrainerSettings
from trainer.model.ranks import Ranks


@dataclass(frozen=True)
class Part:
    """This rank's part of one optimizer step."""

    own: list[list[TrainingGroup]]
    """This rank's micro-batches, not yet packed."""
    size: StepSize
    tokens: int
    """Tokens that all ranks read."""


def make_part(
    groups: Sequence[TrainingGroup], trainable: Sequence[TrainingGroup], max_tokens: int, ranks: Ranks
) -> Part:
    """Return this rank's part of an optimizer step, which is empty when there is no token to train on.

    Args:
        groups: the groups of the step, which the loss's denominators count.
        trainable: those of them that are computed, unless all of their tokens are masked.
        max_tokens: tokens in one micro-batch.
        ranks: all ranks.
    """
    shares = share_out([group for group in trainable if group.trained_tokens], ranks.world_size, max_tokens)
    return Part(
        own=shares[ranks.rank],
        size=StepSize(
            tokens=sum(g.trained_tokens for g in groups),
            sequences=sum(s.trained_tokens > 0 for g in groups for s in g.sequences),
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


def packed(parts: Iterable[Sequence[TrainingGroup]], ranks: Ranks) -> Iterator[MicroBatch]:
    """Yield micro-batches on this rank's device, which holds one at a time, each packed from its pieces.

    On a CPU each is packed when its turn comes. On CUDA a thread packs the next one while the device computes, and the
    host waits neither for the packing nor for the copy.
    """
    if ranks.device.type == "cpu":
        yield from map(pack, parts)
        return
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(ranks.device,)) as thread:
        waiting = deque(parts)
        ahead = deque([thread.submit(_pinned, waiting.popleft())] if waiting else [])
        while ahead:
            batch = ahead.popleft().result()
            if waiting:
                ahead.append(thread.submit(_pinned, waiting.popleft()))
            yield batch.to(ranks.device)


def _pinned(pieces: Sequence[TrainingGroup]) -> MicroBatch:
    return pack(pieces, TreeMask).pinned()


def unknown_ids(group: TrainingGroup, vocabulary: int) -> list[int]:
    """Return the token ids of a group that a model with so many tokens does not know."""
    return [i for ids in group.all_ids() for i in ids if not 0 <= i < vocabulary]


@torch.no_grad()
def token_numbers(
    groups: Sequence[TrainingGroup],
    compute: Callable[[MicroBatch], Tensor],
    max_tokens: int,
    vocabulary: int,
    ranks: Ranks,
) -> list[TokenNumbers]:
    """Return a number of every trained token by group, completion and token, on every rank. A collective.

    Args:
        groups: the groups; the ranks share them. Those with token ids outside the vocabulary get zeros.
        compute: from a micro-batch to one number for each of its N trained tokens, [N].
        max_tokens: tokens in one micro-batch.
        vocabulary: the number of token ids that the model knows.
        ranks: all ranks.
    """
    is_known = [not unknown_ids(group, vocabulary) for group in groups]
    shares = share_out(list(compress(groups, is_known)), ranks.world_size, max_tokens)
    # Computed first and read then, so that the device does not wait for the host in between.
    computed = [compute(batch) for batch in packed(shares[ranks.rank], ranks)]
    # A filler, which computes one token of no group, only keeps the ranks in step.
    own = [values.cpu() for pieces, values in zip(shares[ranks.rank], computed, strict=True) if pieces]
    numbers: dict[int, list[float]] = {}
    for share, values in zip(shares, ranks.gather_vectors(torch.cat([torch.empty(0), *own])), strict=True):
        sequences = [s for pieces in share for piece in pieces for s in piece.sequences]
        parts = values.split([s.trained_tokens for s in sequences]) if sequences else ()
        numbers |= {id(s): part.tolist() for s, part in zip(sequences, parts, strict=True)}
    return [
        [numbers[id(s)] if known else [0.0] * s.trained_tokens for s in group.sequences]
        for group, known in zip(groups, is_known, strict=True)
    ]
