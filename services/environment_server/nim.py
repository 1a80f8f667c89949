"""Nim, a game of two seats whose best moves are known: normal play, in which the last stone wins.

By Bouton's theorem (1901) the player to move wins exactly if the heaps' exclusive or is not 0, with any move that makes
it 0. So every move at such a position is right or wrong, and the share of right ones is reported.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import ClassVar

from services.environment_server.environments import Conversation, Transition
from services.environment_server.guessing import text_of
from services.protocol.evaluation import Action, State

NAMES = "ABC"
MOST_STONES = 5
"""Most stones in a heap."""
ILLEGAL_ANSWERS = 3
"""The illegal answer of this number, counted by seat over the game, loses it."""
RULES = (
    "Nim: take one or more stones from one heap. Whoever takes the last stone wins. Answer with a heap and a number."
)
# A small model answers with moves once it has seen one.
OPENING = (
    {"role": "system", "content": RULES},
    {"role": "user", "content": "A: 2, B: 1"},
    {"role": "assistant", "content": "A1"},
)
"""The first messages of every seat's conversation: the rules, and a move at another position."""
_MOVE = re.compile(rf"\b([{NAMES}])\s?(\d{{1,3}})\b")


def draw_heaps(seed: int) -> list[int]:
    """Return two or three heaps of 1 to MOST_STONES stones; each side wins half of the games that are played well."""
    rng = random.Random(seed)
    first_wins = rng.random() < 0.5
    while True:
        heaps = [rng.randint(1, MOST_STONES) for _ in range(rng.choice((2, 3)))]
        if (reduce(xor, heaps) != 0) == first_wins:
            return heaps


def is_optimal(heaps: Sequence[int], heap: int, stones: int) -> bool | None:
    """Return whether taking ``stones`` from a heap keeps a won game won; None where no move wins."""
    value = reduce(xor, heaps)
    return None if value == 0 else heaps[heap] - stones == heaps[heap] ^ value


class Nim(Conversation):
    """A game of Nim. Its winner's reward is 1, its loser's -1, and every other 0.

    An illegal answer gets a reply, after which the same seat answers again. Figures: ``legal_moves``, the share of
    legal answers, and ``optimal_moves``, the share of winning moves among the legal ones where a move wins.
    """

    seats: ClassVar = 2
    deterministic: ClassVar = True
    version = "1"

    def __init__(self) -> None:
        self._heaps: list[int] = []
        self._seat = 0
        self._illegal = [0, 0]
        self._messages: list[list[dict[str, str]]] = [list(OPENING), list(OPENING)]

    async def reset(self, seed: int) -> State:
        """Draw the heaps."""
        self._heaps = draw_heaps(seed)
        self._tell(self._position())
        return self._view()

    async def step(self, action: Action) -> Transition:
        """Take the last move in the answer of the seat whose turn it is."""
        text = text_of(action)
        self._messages[self._seat].append({"role": "assistant", "content": text})
        moves = _MOVE.findall(text)
        if not moves:
            return self._refuse("I found no move in that.")
        name, stones = moves[-1][0], int(moves[-1][1])
        heap = NAMES.index(name)
        if heap >= len(self._heaps) or not 1 <= stones <= self._heaps[heap]:
            return self._refuse(f"{name}{stones} is not possible.")
        optimal = is_optimal(self._heaps, heap, stones)
        figures = {"legal_moves": 1.0} | ({} if optimal is None else {"optimal_moves": float(optimal)})
        self._heaps[heap] -= stones
        if not any(self._heaps):
            self._tell("You win.")
            return self._transition(figures, winner=self._seat)
        self._seat = 1 - self._seat
        self._tell(f"I took {name}{stones}. {self._position()}")
        return self._transition(figures)

    def _refuse(self, why: str) -> Transition:
        """Return what follows an illegal answer: the same position again, or the end of the game."""
        figures = {"legal_moves": 0.0}
        self._illegal[self._seat] += 1
        if self._illegal[self._seat] == ILLEGAL_ANSWERS:
            self._tell(f"{why} You lose.")
            return self._transition(figures, winner=1 - self._seat)
        self._tell(f"{why} {self._position()}")
        return self._transition(figures)

    def _transition(self, figures: dict[str, float], winner: int | None = None) -> Transition:
        rewards = (0.0, 0.0) if winner is None else ((1.0, -1.0), (-1.0, 1.0))[winner]
        return Transition(
            self._view(), rewards[0], winner is not None, figures=figures, seat=self._seat, rewards=rewards
        )

    def _tell(self, text: str) -> None:
        self._messages[self._seat].append({"role": "user", "content": text})

    def _view(self) -> State:
        return list(self._messages[self._seat])

    def _position(self) -> str:
        return ", ".join(f"{name}: {stones}" for name, stones in zip(NAMES, self._heaps, strict=False))
