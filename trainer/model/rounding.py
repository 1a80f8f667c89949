"""Rounding of weights on their way out of the trainer: to bfloat16 without bias, so that small updates are not lost.

A checkpoint lies on bfloat16's grid, and a step of AdamW moves a weight by far less than half of the grid's spacing.
Rounded to the nearest, most weights would fall back to where they were. Here a weight goes to one of its two neighbours
with the probability that makes its mean exact (stochastic rounding; Gupta et al. 2015, arXiv:1502.02551, section 3.1).
The random number that decides is fixed for each weight by a hash of the parameter's name and the weight's index (a
dither). So every rank, transport and resumed run has the same bytes, consecutive versions differ in few weights, and
nothing is stored. A weight on the grid stays exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.model.ranks import Ranks

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Weights rounded at a time, by device: intermediate results stay in a processor's cache, and a GPU has few
kernels to start."""
_PER_WORD = 4
"""16-bit numbers in a 64-bit word of the hash."""
_STRIDE, _FACTORS, _SHIFTS = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15), (30, 27, 31)
"""Constants of the SplitMix64 generator (Steele et al. 2014, doi:10.1145/2714064.2660195) as signed numbers."""


class Rounding:
    """A cast of parameters to a number format, to the nearest number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, name: str, values: Tensor, first: int = 0) -> Tensor:
        """Return weights in the number format.

        Args:
            name: the parameter's name.
            values: [...] float32, weights that follow each other in the parameter.
            first: index of the first of them in the whole parameter.
        """
        return values.to(self.dtype)


class UnbiasedRounding(Rounding):
    """A cast to bfloat16 by the dither of the parameter's name."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def __call__(self, name: str, values: Tensor, first: int = 0) -> Tensor:
        """See Rounding."""
        flat = values.contiguous().view(-1)
        rounded = torch.empty_like(flat, dtype=torch.bfloat16)
        start = 0
        for block in flat.split(BLOCK[flat.device.type]):
            rounded[start : start + len(block)] = round_up_or_down(block, self.bits(name, first + start, block))
            self.look(name, start, block, rounded[start : start + len(block)])
            start += len(block)
        return rounded.view(values.shape)

    def bits(self, name: str, first: int, like: Tensor) -> Tensor:
        """Return the 16 bits of the dither of weights from ``first`` on, [N] int32, on the device of ``like`` [N]."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        return random_bits(seed, first, like)

    def look(self, name: str, start: int, values: Tensor, rounded: Tensor) -> None:
        """Do nothing; a subclass measures a block's weights, which begin at ``start`` of this rank's."""


class MeasuredRounding(UnbiasedRounding):
    """An unbiased rounding that measures which share of the training's change the rounded weights have.

    The share is <rounded - start, trained - start> / |trained - start|^2 over all weights of all ranks: 1 if the whole
    change arrives, 0 if none does.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Keep a copy of the parameters before training, on the host: in bfloat16 where that is exact."""
        super().__init__()
        self._start = {name: _kept(_local(parameter)) for name, parameter in parameters}
        self._sums: list[Tensor] = []
        """[2] float32 of each block: the numerator and the denominator of the share."""

    def look(self, name: str, start: int, values: Tensor, rounded: Tensor) -> None:
        """Add a block to the sums."""
        before = self._start[name][start : start + len(values)].to(values.device, torch.float32, non_blocking=True)
        trained = values - before
        self._sums.append(torch.stack((torch.dot(rounded.float() - before, trained), torch.dot(trained, trained))))

    def share(self, ranks: Ranks) -> float | None:
        """Return the share of the weights rounded since the last call, None if none has changed. A collective."""
        # Replicas of a shard count alike in both sums.
        sums = torch.stack(self._sums).double().sum(0).tolist() if self._sums else [0.0, 0.0]
        self._sums.clear()
        total = ranks.total({"along": sums[0], "squared": sums[1]})
        return total["along"] / total["squared"] if total["squared"] else None


def random_bits(seed: int, first: int, like: Tensor) -> Tensor:
    """Return 16 random bits for each of the weights from index ``first`` on, [N] int32, on the device of ``like`` [N].

    The bits of a weight depend on the seed and its index alone: they are a quarter of the word of a counter-based
    generator, SplitMix64.
    """
    skipped = first % _PER_WORD
    begin, end = first // _PER_WORD, -(-(first + len(like)) // _PER_WORD)
    word = torch.arange(begin, end, device=like.device).mul_(_STRIDE).add_(seed)
    for factor, shift in zip((*_FACTORS, 1), _SHIFTS, strict=True):
        word.bitwise_xor_((word >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return word.view(torch.int16)[skipped : skipped + len(like)].to(torch.int32).bitwise_and_(0xFFFF)


def round_up_or_down(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values [N] as bfloat16, away from 0 where ``bits`` [N], 16 each, carry into the upper half."""
    pattern = values.view(torch.int32)
    # A carry would turn some NaN into a number.
    carried = torch.where(values.isnan(), pattern, pattern + bits)
    return (carried >> 16).to(torch.int16).view(torch.bfloat16)


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().reshape(-1)


def _kept(values: Tensor) -> Tensor:
    short = values.to(torch.bfloat16)
    kept = (short if torch.equal(short.float(), values) else values).to("cpu", copy=True)
    return kept.pin_memory() if values.is_cuda else kept
