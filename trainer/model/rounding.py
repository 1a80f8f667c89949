"""Rounding of weights to bfloat16 without bias, so that small updates are not lost: one policy for trainer and engines.

A checkpoint lies on bfloat16's grid, and a step of AdamW moves a weight by far less than half of the grid's spacing.
Rounded to the nearest, most weights would fall back to where they were. Here a weight goes to one of its two neighbours
with the probability that makes its mean exact (stochastic rounding; Gupta et al. 2015, arXiv:1502.02551, section 3.1).
The random number that decides is fixed for each weight by a hash of the parameter's name and the weight's index (a
dither). So every rank, transport and resumed run has the same bytes, and consecutive versions differ in few weights. A
weight on the grid stays exact.

The trainer computes with the weights that it publishes: ``Masters`` rounds the parameters once after each optimizer
step. Forward passes, publications and files have these parameters; optimizer and checkpoints have the float32 masters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from trainer.model.ranks import Ranks

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Weights rounded at a time, by device: intermediate results stay in a processor's cache, and a GPU has few
kernels to start."""
_PER_WORD = 4
"""16-bit numbers in a 64-bit word of the hash."""
_STRIDE, _FACTORS, _SHIFTS = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15), (30, 27, 31)
"""Constants of the SplitMix64 generator (Steele et al. 2014, doi:10.1145/2714064.2660195) as signed numbers."""
_QUIET = 1 << 22
"""The bit of a float32 that makes a quiet NaN of any NaN."""


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


class NearestRounding(UnbiasedRounding):
    """A cast to bfloat16, to the nearest number, and of two equally near ones away from 0."""

    def bits(self, name: str, first: int, like: Tensor) -> Tensor:
        """Return half of the distance between two numbers, which carries from the middle on."""
        return torch.full_like(like, 1 << 15, dtype=torch.int32)


class MeasuredRounding(UnbiasedRounding):
    """An unbiased rounding that measures which share of the training's change the rounded weights have.

    The share is <rounded - start, trained - start> / |trained - start|^2 over all weights of all ranks: 1 if the whole
    change arrives, 0 if none does.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Keep a copy of the parameters before training, on the host: in bfloat16 where that is exact."""
        super().__init__()
        self._start = {name: _kept(_local(parameter)) for name, parameter in parameters}
        self._sums: dict[tuple[str, int], Tensor] = {}
        """[2] float32 of each block, as it was rounded last: the numerator and the denominator of the share."""

    def look(self, name: str, start: int, values: Tensor, rounded: Tensor) -> None:
        """Measure a block."""
        before = self._start[name][start : start + len(values)].to(values.device, torch.float32, non_blocking=True)
        trained = values - before
        along, squared = torch.dot(rounded.float() - before, trained), torch.dot(trained, trained)
        self._sums[name, start] = torch.stack((along, squared))

    def share(self, ranks: Ranks) -> float | None:
        """Return the share of the weights as they were rounded last, None if none has changed. A collective."""
        # Replicas of a shard count alike in both sums.
        sums = torch.stack([*self._sums.values()]).double().sum(0).tolist() if self._sums else [0.0, 0.0]
        total = ranks.total({"along": sums[0], "squared": sums[1]})
        return total["along"] / total["squared"] if total["squared"] else None


class Masters:
    """The float32 masters of parameters that are rounded in place.

    The upper half of a master is in its parameter, rounded up or not; the lower half, 2 bytes, is kept here. The bits
    of the rounding tell whether the upper half was rounded up, so that masters return to the bit.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]] = (), rounding: UnbiasedRounding | None = None) -> None:
        """Round the parameters: float32, whole or shards of rows, each with its name."""
        self.parameters = dict(parameters)
        self.rounding = rounding or UnbiasedRounding()
        """Changes only while the masters are in place."""
        self._lower = {name: torch.empty_like(_local(p), dtype=torch.int16) for name, p in self.parameters.items()}
        self._are_in_place = True
        self.round()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters their masters within the block, and round them, changed or not, at its end."""
        was_in_place = self._are_in_place
        self.restore()
        try:
            yield
        finally:
            if not was_in_place:
                self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Round the parameters, if they have their masters."""
        for name, start, weights, lower, bits in self._blocks() if self._are_in_place else ():
            lower.copy_(weights.view(torch.int16)[::2])
            rounded = round_up_or_down(weights, bits)
            self.rounding.look(name, start, weights, rounded)
            weights.copy_(rounded)
        self._are_in_place = False

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their masters, if they are rounded."""
        for _, _, weights, lower, bits in () if self._are_in_place else self._blocks():
            half = lower.to(torch.int32).bitwise_and_(0xFFFF)
            carried = bits.add_(half).bitwise_and_(1 << 16).masked_fill_(weights.isnan(), 0)
            weights.view(torch.int32).add_(half.sub_(carried))
        self._are_in_place = True

    def _blocks(self) -> Iterator[tuple[str, int, Tensor, Tensor, Tensor]]:
        """Yield each block's name, first index on this rank, weights, lower halves and bits of the rounding."""
        for name, parameter in self.parameters.items():
            weights, first, start = _local(parameter), _first_index(parameter), 0
            size = BLOCK[weights.device.type]
            for block, lower in zip(weights.split(size), self._lower[name].split(size), strict=True):
                yield name, start, block, lower, self.rounding.bits(name, first + start, block)
                start += len(block)


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
    # A carry would turn some NaN into a number, and a NaN whose upper half is that of infinity would become infinite.
    carried = torch.where(values.isnan(), pattern | _QUIET, pattern + bits)
    return (carried >> 16).to(torch.int16).view(torch.bfloat16)


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().view(-1)


def _first_index(parameter: Tensor) -> int:
    """Return the index in the whole parameter of this rank's first weight."""
    if not isinstance(parameter, DTensor):
        return 0
    (dimension,) = (i for i, placement in enumerate(parameter.placements) if isinstance(placement, Shard))
    rows = -(-parameter.shape[0] // parameter.device_mesh.size(dimension))
    return parameter.device_mesh.get_local_rank(dimension) * rows * parameter.shape[1:].numel()


def _kept(values: Tensor) -> Tensor:
    short = values.to(torch.bfloat16)
    kept = (short if torch.equal(short.float(), values) else values).to("cpu", copy=True)
    return kept.pin_memory() if values.is_cuda else kept
