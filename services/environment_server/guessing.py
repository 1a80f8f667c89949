"""A guessing game, the smallest environment of text."""

from __future__ import annotations

import random
import re
from typing import ClassVar

from services.environment_server.environments import ActionRefusedError, Conversation, Transition
from services.protocol.evaluation import Action, State

LARGEST = 100
RULES = (
    "I think of a whole number from 1 to {largest}. Guess it. Answer with one number; I say whether mine is higher or "
    "lower. You have {turns} guesses."
)
_NUMBER = re.compile(r"-?\d{1,9}")


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
        self._messages = [{"role": "user", "content": RULES.format(turns=self._left, largest=self._largest)}]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Take the last number in the policy's answer as the guess."""
        text = text_of(action)
        self._left -= 1
        numbers = _NUMBER.findall(text)
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


def text_of(action: Action) -> str:
    """Return an action that is text.

    Raises:
        ActionRefusedError: the action is not text.
    """
    if not isinstance(action, str):
        raise ActionRefusedError(f"the action is {str(action)[:60]!r}; allowed is text")
    return action
