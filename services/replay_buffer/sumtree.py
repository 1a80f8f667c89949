"""A sum tree: draws a leaf with a chance proportional to its weight, and changes one, in O(log n)."""

from __future__ import annotations

from typing import Any

import numpy as np


class SumTree:
    """Weights of ``size`` leaves with the sums of all pairs above them.

    Every node is the exact floating-point sum of its two children, so the tree is a function of its leaves alone: the
    history of changes leaves no trace, which makes seeded draws repeatable after a restart.
    """

    def __init__(self, weights: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Builds the tree in O(n). ``weights``: shape [size], not negative."""
        self._leaves = 1 << max(0, int(len(weights) - 1).bit_length())
        nodes = np.zeros(2 * self._leaves)
        nodes[self._leaves : self._leaves + len(weights)] = weights
        level = self._leaves
        while level > 1:
            below = nodes[level : 2 * level]
            nodes[level // 2 : level] = below[0::2] + below[1::2]
            level //= 2
        # A list, since Python reads and writes its single elements several times as fast.
        self._nodes: list[float] = nodes.tolist()

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return self._nodes[1]

    def __getitem__(self, leaf: int) -> float:
        return self._nodes[self._leaves + leaf]

    def __setitem__(self, leaf: int, weight: float) -> None:
        nodes = self._nodes
        node = self._leaves + leaf
        nodes[node] = weight
        node >>= 1
        while node:
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
            node >>= 1

    def find(self, point: float) -> int:
        """The leaf in whose share of [0, total) ``point`` lies; never one of weight 0 while ``total`` > 0."""
        nodes = self._nodes
        node = 1
        while node < self._leaves:
            left = nodes[2 * node]
            # Rounding can push a point past the last weight: where one side is empty, the other is taken.
            if nodes[2 * node + 1] == 0 or (point < left and left > 0):
                node = 2 * node
            else:
                point -= left
                node = 2 * node + 1
        return node - self._leaves
