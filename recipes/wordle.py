"""The environment of recipes/wordle.env: a word of five letters is found by six guesses."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import ClassVar

from services.environment_server.environments import Conversation, Transition, text_of
from services.protocol.evaluation import Action, State

GUESSES = 6
RULES = (
    "I think of a common English noun of five letters. Find it with six guesses. Think first, then write your guess as "
    "<guess>[crane]</guess>. For each letter I answer G if it is in its place, Y if it belongs to another place, and X "
    "if the word has no such letter."
)
WORDS = Path(__file__).with_name("wordle_words.txt").read_text("utf-8").split()
_GUESS = re.compile(r"<guess>\s*\[?\s*([a-z]*)\s*\]?\s*</guess>", re.IGNORECASE)


class Wordle(Conversation):
    """A game of Wordle, whose rewards come with the last guess.

    The right word has reward 1 + 1 / guesses; otherwise each letter of the last word has 0.2 in its place and 0.1
    elsewhere. The share of answers with a guess in tags, times 0.2, is added. An answer without a word costs a guess.
    """

    deterministic: ClassVar = True
    version = "1"

    def __init__(self) -> None:
        self._secret = ""
        self._messages: list[dict[str, str]] = []
        self._guesses = self._tagged = 0
        self._marks = ""

    async def reset(self, seed: int) -> State:
        """Draw the word."""
        self._secret = random.Random(seed).choice(WORDS)
        self._messages = [{"role": "user", "content": RULES}]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Take the last guess in tags; a guess of another length gets no marks."""
        text = text_of(action)
        guesses = _GUESS.findall(text)
        guess = guesses[-1].lower() if guesses else ""
        self._guesses += 1
        self._tagged += bool(guesses)
        is_right = guess == self._secret
        if len(guess) == len(self._secret):
            self._marks = marks(guess, self._secret)
            reply = " ".join(guess.upper()) + "\n" + " ".join(self._marks)
        else:
            reply = "I found no word of five letters in <guess></guess>."
        left = GUESSES - self._guesses
        self._messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"{reply}\nGuesses left: {left}"},
        ]
        is_over = is_right or left == 0
        figures = {"won": float(is_right)} if is_over else {}
        reward = self._reward(is_right=is_right) if is_over else 0.0
        return Transition(list(self._messages), reward, terminated=is_over, figures=figures)

    def _reward(self, *, is_right: bool) -> float:
        tags = 0.2 * self._tagged / self._guesses
        if is_right:
            return 1 + 1 / self._guesses + tags
        return 0.2 * self._marks.count("G") + 0.1 * self._marks.count("Y") + tags


def marks(guess: str, secret: str) -> str:
    """Return G, Y or X for each letter of ``guess``; no letter has more G and Y than ``secret`` has of it."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    result = []
    for letter, right in zip(guess, secret, strict=True):
        is_elsewhere = letter != right and left[letter] > 0
        left[letter] -= is_elsewhere
        result.append("G" if letter == right else "Y" if is_elsewhere else "X")
    return "".join(result)
