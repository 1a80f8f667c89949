"""The environment of `make demo-environment`: a number from 1 to 7, which three good guesses always find."""

from __future__ import annotations

from services.environment_server.games import GuessingGame
from services.protocol.evaluation import State

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
    """The guessing game with seven numbers, three guesses and a game that is shown first."""

    def __init__(self) -> None:
        super().__init__(turns=3, largest=7)
        self.version += ", one shown"

    async def reset(self, seed: int) -> State:
        """Draw the number; return the rules and the game that is shown."""
        await super().reset(seed)
        self._messages += SHOWN
        return list(self._messages)
