"""Random batches of completions of different lengths: packed as the trainer has them, as lists for a formula written
out by hand, and padded as other libraries have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = list[list[float]]


@dataclass(frozen=True)
class Ragged:
    """S completions; ``rows[name][s][t]`` is a token's number, float64."""

    lengths: list[int]
    rows: dict[str, Rows]

    @property
    def n_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        return torch.arange(self.n_sequences).repeat_interleave(torch.tensor(self.lengths))

    @property
    def mask(self) -> Tensor:
        """[S, L] int64, 1 at tokens; L is the longest completion, padded further by two."""
        width = torch.arange(max(self.lengths) + 2)
        return (width < torch.tensor(self.lengths)[:, None]).long()

    def packed(self, name: str) -> Tensor:
        """[N] float64."""
        return pack_rows(self.rows[name])

    def padded(self, name: str) -> Tensor:
        """[S, L] float64, with 1.25 where there is no token, so that a forgotten mask shows."""
        padded = torch.full(self.mask.shape, 1.25, dtype=torch.float64)
        padded[self.mask.bool()] = self.packed(name)
        return padded

    def unpadded(self, matrix: Tensor) -> Tensor:
        """[N]: the tokens of [S, L]."""
        return matrix[self.mask.bool()]


def pack_rows(rows: Iterable[Iterable[float]]) -> Tensor:
    """[N] float64: rows of different lengths one after the other."""
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def random_ragged(
    seed: int, *, spread: float = 0.5, shortest: int = 0, n_sequences: int = 9, broken: bool = True
) -> Ragged:
    """Return log-probabilities of four policies that differ by about ``spread``, and an advantage a completion.

    The second completion has ``shortest`` tokens. With ``broken``, the first has two tokens of which ``old`` differs
    by more than any clamp allows, up and down.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (n_sequences,), generator=generator).tolist()
    lengths[0], lengths[1] = max(lengths[0], 2), shortest

    def rows(scale: float, centre: Rows | None = None) -> Rows:
        noise = [(scale * torch.randn(n, dtype=torch.float64, generator=generator)).tolist() for n in lengths]
        if centre is None:
            return [[-abs(x) - 0.01 for x in row] for row in noise]
        return [[c + x for c, x in zip(cs, row, strict=True)] for cs, row in zip(centre, noise, strict=True)]

    theta = rows(2.0)
    old, behaviour, reference = (rows(spread, theta) for _ in range(3))
    if broken:
        old[0][0], old[0][1] = theta[0][0] - 25.0, theta[0][1] + 25.0
    advantage = torch.randn(n_sequences, dtype=torch.float64, generator=generator).tolist()
    advantage[-1] = 0.0
    repeated = [[a] * n for a, n in zip(advantage, lengths, strict=True)]
    return Ragged(
        lengths,
        {"theta": theta, "old": old, "behaviour": behaviour, "reference": reference, "advantage": repeated},
    )
