"""The built-in games: guessing a number, the smallest environment of text; and Nim, for two seats.

Nim is played normally: the last stone wins. By Bouton's theorem (1901) the player to move wins exactly if the heaps'
exclusive or is not 0, with any move that makes it 0. So every move at such a position is right or wrong, and the share
of right moves is reported.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import ClassVar

from services.environment_server.environments import Conversation, Transition, text_of
from services.protocol.evaluation import Action, State

LARGEST = 100
GUESSING_RULES = (
    "I think of a whole number from 1 to {largest}. Guess it. Answer with one number; I say whether mine is higher or "
    "lower. You have {turns} guesses."
)
_GUESS = re.compile(r"-?\d{1,9}")


class GuessingGame(Conversation):
    """A number to guess, from 1 to ``largest``. The right guess has reward 1, any other 0."""

    deterministic: ClassVar = True

    def __init__(self, turns: int, largest: int = LARGEST) -> None:
        self.version = f"1, {turns} guesses up to {largest}"
        self._left = turns
        self._largest = largest
        self._secret = 0
        self._messages: list[dict[str, str]] = []

    async def reset(self, seed: int) -> State:
        """Draw the number."""
        self._secret = random.Random(seed).randint(1, self._largest)
        self._messages = [{"role": "user", "content": GUESSING_RULES.format(turns=self._left, largest=self._largest)}]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Take the last number in the policy's answer as the guess."""
        text = text_of(action)
        self._left -= 1
        numbers = _GUESS.findall(text)
        is_right = bool(numbers) and int(numbers[-1]) == self._secret
        if is_right:
            reply = "Right."
        elif not numbers:
            reply = "I found no number in that. Answer with one number."
        else:
            reply = "Higher." if int(numbers[-1]) < self._secret else "Lower."
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        return Transition(
            list(self._messages), float(is_right), terminated=is_right, truncated=not is_right and self._left == 0
        )


# The model has never played. One game, of another number, makes it answer with numbers.
SHOWN = [
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Lower."},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Higher."},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Right. I think of another number from 1 to 7."},
]


class SevenNumbers(GuessingGame):
    """The environment of `make demo-environment`: seven numbers, of which three good guesses always find one.

    A game is shown first.
    """

    def __init__(self) -> None:
        super().__init__(turns=3, largest=7)
        self.version += ", one shown"

    async def reset(self, seed: int) -> State:
        """Draw the number; return the rules and the game that is shown."""
        await super().reset(seed)
        self._messages += SHOWN
        return list(self._messages)


NAMES = "ABC"
MOST_STONES = 5
"""Most stones in a heap."""
ILLEGAL_ANSWERS = 3
"""The illegal answer of this number, counted by seat over the game, loses it."""
NIM_RULES = (
    "Nim: take one or more stones from one heap. Whoever takes the last stone wins. Answer with a heap and a number."
)
# A small model answers with moves once it has seen one.
OPENING = (
    {"role": "system", "content": NIM_RULES},
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
