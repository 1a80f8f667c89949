"""The player of ROLLOUT=environment: games on environment-servers with the model in training at one seat or at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.agents import AgentFailedError
from services.clients.environment import EnvironmentClient
from services.core.errors import ConfigurationError
from services.protocol.prompts import Prompt
from trainer.rollouts.game import Game
from trainer.rollouts.opponent import Opponent


class EnvironmentPlayer:
    """A player of games by seeds. ``opponent`` is a fixed model; without it the model in training plays every seat."""

    def __init__(self, environments: EnvironmentClient, opponent: Opponent | None = None) -> None:
        self._environments = environments
        self._opponent = opponent
        self._counting = asyncio.Lock()
        self._count: int | None = None

    async def trained_seats(self, prompt: Prompt) -> list[int]:
        """Return the seats of a prompt's games that are trained: all, or with an opponent one, which the seed chooses.

        Raises:
            AgentFailedError: the prompt is no seed.
            ConfigurationError: there is an opponent, and the environment has one seat.
            DependencyLostError: no environment-server answered.
        """
        seats = await self.seats()
        if self._opponent is None:
            return list(range(seats))
        if seats == 1:
            raise ConfigurationError("OPPONENT is set, but the environment has one seat; unset OPPONENT")
        return [_seed_of(prompt) % seats]

    async def seats(self) -> int:
        """Return the number of the environment's seats, from an episode that is begun and ended.

        Raises:
            DependencyLostError: no environment-server answered.
        """
        async with self._counting:
            if self._count is None:
                async with await self._environments.begin(0) as episode:
                    self._count = episode.environment.seats
        return self._count

    @asynccontextmanager
    async def game(self, prompt: Prompt, trained: Sequence[int]) -> AsyncIterator[Game]:
        """Yield the game of a prompt's seed, for agents at the ``trained`` seats; the opponent has the others."""
        async with Game(lambda: self._environments.begin(_seed_of(prompt), _split_of(prompt))) as game:
            if self._opponent is not None:
                for seat in set(range(await self.seats())) - set(trained):
                    game.seat_opponent(seat, self._opponent.ask)
            yield game


def _seed_of(prompt: Prompt) -> int:
    if not (prompt.ground_truth.isascii() and prompt.ground_truth.isdecimal()):
        raise AgentFailedError(
            f"prompt {prompt.id} has the ground truth {prompt.ground_truth[:60]!r} in place of a seed; "
            "set DATASET=seeds for ROLLOUT=environment",
            "seed",
        )
    return int(prompt.ground_truth) % 2**31


def _split_of(prompt: Prompt) -> str | None:
    """Return the split that the prompt's id names, as in ``seeds/train/17``."""
    parts = prompt.id.split("/")
    return parts[-2] if len(parts) > 1 else None
