"""A guessing game: the smallest environment of text, for trying things out."""

from __future__ import annotations

import random
import re

from services.environment_server.environments import ActionRefusedError, Conversation, Transition
from services.protocol.evaluation import Action, State

LARGEST = 100
RULES = (
    f"I think of a whole number from 1 to {LARGEST}. Guess it. Answer with one number; I say whether mine is higher or "
    f"lower. You have {{turns}} guesses."
)
_NUMBER = re.compile(r"-?\d{1,9}")


class GuessingGame(Conversation):
    """A number to guess. The reward is 1 for the right guess, and there is no other."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._left = turns
        self._secret = 0
        self._messages: list[dict[str, str]] = []

    async def reset(self, seed: int) -> State:
        """Thinks of a number."""
        self._secret = random.Random(seed).randint(1, LARGEST)
        self._left = self._turns
        self._messages = [{"role": "user", "content": RULES.format(turns=self._turns)}]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Takes the last number of what was said as the guess."""
        text = said(action)
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


def said(action: Action) -> str:
    """What the policy said.

    Raises:
        ActionRefusedError: the action is no text.
    """
    if not isinstance(action, str):
        raise ActionRefusedError(f"the action is {str(action)[:60]!r}; allowed is the text that the policy says")
    return action
