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
_SIZE, _INFINITY = 0x7FFFFFFF, 0x7F800000
"""All bits of a float32 but its sign, and those of infinity."""


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
            rounded[start : start + len(block)] = shifted(block, self.offsets(name, first + start, block))
            start += len(block)
        return rounded.view(values.shape)

    def offsets(self, name: str, first: int, like: Tensor) -> Tensor:
        """Return the dither of weights from ``first`` on, [N] int16, on the device of ``like`` [N].

        A weight that is moved by its offset goes to its nearest bfloat16 number. Offsets are odd and less than half of
        the distance between two bfloat16 numbers, in float32's steps. The offset of a weight depends on the name and
        its index alone: it is a quarter of a word of a counter-based generator, SplitMix64.
        """
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        skipped = first % _PER_WORD
        begin, end = first // _PER_WORD, -(-(first + len(like)) // _PER_WORD)
        word = torch.arange(begin, end, device=like.device).mul_(_STRIDE).add_(seed)
        for factor, shift in zip((*_FACTORS, 1), _SHIFTS, strict=True):
            word.bitwise_xor_((word >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
        return word.view(torch.int16)[skipped : skipped + len(like)].bitwise_or_(1)

    def look(self, name: str, start: int, values: Tensor, rounded: Tensor) -> None:
        """Do nothing; a subclass measures a block that ``Masters`` has rounded, from ``start`` of this rank's on."""


class NearestRounding(UnbiasedRounding):
    """A cast to bfloat16 without a dither."""

    def offsets(self, name: str, first: int, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(like, dtype=torch.int16)


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
        along, squared = torch.dot(rounded.bfloat16().float() - before, trained), torch.dot(trained, trained)
        self._sums[name, start] = torch.stack((along, squared))

    @property
    def is_exact(self) -> bool:
        """True if this rank's parameters were on bfloat16's grid before training, so that rounding kept them."""
        return all(start.dtype is torch.bfloat16 for start in self._start.values())

    def share(self, ranks: Ranks) -> float | None:
        """Return the share of the weights as they were rounded last, None if none has changed. A collective."""
        # Replicas of a shard count alike in both sums.
        sums = torch.stack([*self._sums.values()]).double().sum(0).tolist() if self._sums else [0.0, 0.0]
        total = ranks.total({"along": sums[0], "squared": sums[1]})
        return total["along"] / total["squared"] if total["squared"] else None


class Masters:
    """The float32 masters of trained parameters, which are rounded between optimizer steps.

    A rounded parameter is its master, moved by the offset of the dither. Its nearest bfloat16 number is the policy's
    weight, which passes, publications and files get by a cast. Moved back, it is the master to the bit, so that no
    memory is needed. Passes in float32 cast nothing: for them the parameter is the policy's weight itself, and the
    lower half of the moved master, 2 bytes, is kept here.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]] = (),
        rounding: UnbiasedRounding | None = None,
        *,
        are_cast: bool = True,
    ) -> None:
        """Round the parameters.

        Args:
            parameters: float32, whole or shards of rows, each with its name.
            rounding: the rounding; by default the unbiased one.
            are_cast: forward passes cast the parameters to bfloat16.
        """
        self.parameters = dict(parameters)
        self.rounding = rounding or UnbiasedRounding()
        """Changes only while the masters are in place."""
        kept = {} if are_cast else self.parameters
        self._lower = {name: torch.empty_like(_local(p), dtype=torch.int16) for name, p in kept.items()}
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
        for name, start, weights, lower, offsets in self._blocks() if self._are_in_place else ():
            rounded = shifted(weights, offsets)
            if lower is not None:
                # As a signed number it is the distance from the nearest number whose lower half is 0.
                lower.copy_(rounded.view(torch.int16)[::2])
                rounded.view(torch.int32).sub_(lower)
            self.rounding.look(name, start, weights, rounded)
            weights.copy_(rounded)
        self._are_in_place = False

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their masters, if they are rounded."""
        for _, _, weights, lower, offsets in () if self._are_in_place else self._blocks():
            if lower is not None:
                weights.view(torch.int32).add_(lower)
            weights.copy_(shifted(weights, offsets.neg_()))
        self._are_in_place = True

    def _blocks(self) -> Iterator[tuple[str, int, Tensor, Tensor | None, Tensor]]:
        """Yield each block's name, first index on this rank, weights, lower halves if kept, and offsets."""
        for name, parameter in self.parameters.items():
            weights, first, start = _local(parameter), _first_index(parameter), 0
            for block in weights.split(BLOCK[weights.device.type]):
                end, lower = start + len(block), self._lower.get(name)
                part = None if lower is None else lower[start:end]
                yield name, start, block, part, self.rounding.offsets(name, first + start, block)
                start = end


def shifted(values: Tensor, offsets: Tensor) -> Tensor:
    """Return float32 values [N], each moved by ``offsets`` [N] int16 numbers of float32; infinity and NaN stay.

    The opposite offsets undo that, except for numbers above bfloat16's largest, 3.4e38.
    """
    # In bits, because torch.where takes ten times as long.
    pattern = values.view(torch.int32)
    is_number = (pattern & _SIZE).sub_(_INFINITY).bitwise_right_shift_(31)  # -1 or 0
    line = _in_order(pattern).add_(is_number.bitwise_and_(offsets))
    return _in_order(line).view(torch.float32)


def _in_order(pattern: Tensor) -> Tensor:
    """Return integers in the order of the float32 numbers whose bits are ``pattern``, or the bits of such integers."""
    return (pattern >> 31).bitwise_and_(_SIZE).bitwise_xor_(pattern)


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
