"""A gridworld in tokens: each token is a step of a walk over a grid, and every value is known by dynamic programming.

A walk starts in the middle of a grid of 3 by 3 cells and takes HORIZON steps, fewer if it reaches the goal, which is
worth 1, or the pit, which is worth -1. Each step costs STEP_COST, and a step off the grid stays where it is. The policy
takes every direction with the same probability, so the walks listed as often as they are likely are its distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

HORIZON = 4
STEP_COST = -0.125
START, GOAL, PIT = (1, 1), (2, 2), (0, 0)
DIRECTIONS = {2: (0, 1), 3: (0, -1), 4: (1, 0), 5: (-1, 0)}
"""The step of each token."""

Cell = tuple[int, int]


@dataclass(frozen=True)
class Walk:
    """A walk by its tokens; ``cells`` has the cell before each token."""

    tokens: list[int]
    cells: list[Cell]
    rewards: list[float]
    probability: float


def step(cell: Cell, token: int) -> tuple[Cell, float, bool]:
    """Return the next cell, the reward, and whether the walk ends there."""
    dx, dy = DIRECTIONS[token]
    x, y = (min(max(i, 0), 2) for i in (cell[0] + dx, cell[1] + dy))
    ending = {GOAL: 1.0, PIT: -1.0}.get((x, y))
    return (x, y), STEP_COST + (ending or 0.0), ending is not None


@cache
def value(cell: Cell, steps_left: int, gamma: float) -> float:
    """Return the expected discounted sum of rewards from a cell on (Bellman's equation)."""
    if not steps_left:
        return 0.0
    return sum(action_value(cell, token, steps_left, gamma) for token in DIRECTIONS) / len(DIRECTIONS)


def action_value(cell: Cell, token: int, steps_left: int, gamma: float) -> float:
    """Return the expected discounted sum of rewards after ``token``."""
    following, reward, is_over = step(cell, token)
    return reward + (0.0 if is_over else gamma * value(following, steps_left - 1, gamma))


def all_walks(cell: Cell = START, steps_left: int = HORIZON) -> Iterator[Walk]:
    """Yield every walk once."""
    for token in DIRECTIONS:
        following, reward, is_over = step(cell, token)
        ends = is_over or steps_left == 1
        rest = [Walk([], [], [], 1.0)] if ends else all_walks(following, steps_left - 1)
        for walk in rest:
            yield Walk([token, *walk.tokens], [cell, *walk.cells], [reward, *walk.rewards], walk.probability / 4)


@dataclass(frozen=True)
class Walks:
    """All walks, packed: S walks with N tokens in all."""

    walks: list[Walk]
    sequence_ids: Tensor
    """[N] int64."""
    rewards: Tensor
    """[N] float64."""
    probabilities: Tensor
    """[N] float64: that of the token's walk."""

    def values(self, gamma: float) -> Tensor:
        """Return the exact values [N] of the states before the tokens."""
        return self._each(lambda cell, _token, steps_left: value(cell, steps_left, gamma))

    def advantages(self, gamma: float) -> Tensor:
        """Return the exact advantages [N], Q - V."""
        return self._each(
            lambda cell, token, steps_left: (
                action_value(cell, token, steps_left, gamma) - value(cell, steps_left, gamma)
            )
        )

    def prefixes(self, *, with_token: bool) -> Tensor:
        """Return a number [N] for each token's state, equal where the walks are the same up to there.

        Args:
            with_token: compare the token itself, too.
        """
        known: dict[tuple[int, ...], int] = {}
        ends = [(walk, i + with_token) for walk in self.walks for i in range(len(walk.tokens))]
        return torch.tensor([known.setdefault(tuple(walk.tokens[:end]), len(known)) for walk, end in ends])

    def _each(self, function: Callable[[Cell, int, int], float]) -> Tensor:
        return torch.tensor(
            [
                function(cell, token, HORIZON - i)
                for walk in self.walks
                for i, (cell, token) in enumerate(zip(walk.cells, walk.tokens, strict=True))
            ],
            dtype=torch.float64,
        )


def packed_walks() -> Walks:
    """Return all walks, packed."""
    walks = list(all_walks())
    lengths = torch.tensor([len(walk.tokens) for walk in walks])
    return Walks(
        walks,
        torch.arange(len(walks)).repeat_interleave(lengths),
        torch.tensor([r for walk in walks for r in walk.rewards], dtype=torch.float64),
        torch.tensor([walk.probability for walk in walks], dtype=torch.float64).repeat_interleave(lengths),
    )
