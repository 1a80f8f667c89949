"""Functions as policies, for tests of trajectories."""

from __future__ import annotations

import re
import time
from functools import reduce
from operator import xor
from typing import Any


def lean(states: list[list[float]]) -> list[int]:
    """Push the cart to the side where the pole leans."""
    return [int(state[2] + 0.3 * state[3] > 0) for state in states]


def slow_lean(states: list[list[float]]) -> list[int]:
    """Do the same, and take a while."""
    time.sleep(0.005)
    return lean(states)


def left(states: list[list[float]]) -> list[int]:
    return [0 for _ in states]


def wrong(states: list[list[float]]) -> list[int]:
    return [99 for _ in states]


def heaps(state: list[dict[str, str]]) -> dict[str, int]:
    """Return the stones of each heap in a game of Nim."""
    return {name: int(stones) for name, stones in re.findall(r"\b([ABC]): (\d+)", state[-1]["content"])}


def optimal(states: list[Any]) -> list[str]:
    """Play Nim by Bouton's theorem; take a stone where no move wins."""
    moves = []
    for state in states:
        found = heaps(state)
        value = reduce(xor, found.values())
        winning = [f"{name}{n - (n ^ value)}" for name, n in found.items() if n ^ value < n]
        moves.append(winning[0] if winning else next(f"{name}1" for name, n in found.items() if n))
    return moves


def greedy(states: list[Any]) -> list[str]:
    """Take the whole of the first heap that has stones."""
    return [next(f"{name}{n}" for name, n in heaps(state).items() if n) for state in states]
