"""Self-play at Nim with the advantages of training, and a table of positions in the place of the language model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import pytest
from numpy.typing import NDArray

from services.environment_server.games import NAMES, Nim
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason, RewardResult
from tests.sequences import make_group
from trainer.config import TrainerSettings
from trainer.config.objective import Objective

SETTINGS = TrainerSettings.load(advantage="dr_grpo")
STEPS, PROMPTS, GAMES, LEARNING_RATE = 80, 4, 8, 0.5

Heaps = tuple[int, ...]
Moves = list[tuple[Heaps, int]]
"""Positions, each with the number of the move that was taken there."""


@dataclass
class Table:
    """A policy with a softmax over the legal moves of each position."""

    rng: np.random.Generator
    logits: dict[Heaps, NDArray[np.float64]] = field(default_factory=dict)

    def probabilities(self, heaps: Heaps) -> NDArray[np.float64]:
        weights = np.exp(self.logits.setdefault(heaps, np.zeros(sum(heaps))))
        return weights / weights.sum()

    def choose(self, heaps: Heaps) -> int:
        return int(self.rng.choice(sum(heaps), p=self.probabilities(heaps)))

    def learn(self, heaps: Heaps, move: int, advantage: float) -> None:
        """Add the advantage times the gradient of the move's log-probability."""
        gradient = -self.probabilities(heaps)
        gradient[move] += 1
        self.logits[heaps] = self.logits[heaps] + LEARNING_RATE * advantage * gradient


async def play(table: Table, seed: int) -> tuple[list[Moves], list[float], list[float]]:
    """Return the moves and the return of each seat, and the optimality of the moves where one wins."""
    game, seat, moves, returns, optimal = Nim(), 0, [[], []], [0.0, 0.0], []
    state = await game.reset(seed)
    while True:
        heaps = tuple(map(int, re.findall(r"[ABC]: (\d)", state[-1]["content"])))
        move = table.choose(heaps)
        moves[seat].append((heaps, move))
        names = [f"{NAMES[heap]}{stones}" for heap, size in enumerate(heaps) for stones in range(1, size + 1)]
        transition = await game.step(names[move])
        returns = [sum(pair) for pair in zip(returns, transition.rewards, strict=True)]
        optimal += [value for name, value in transition.figures.items() if name == "optimal_moves"]
        state, seat = transition.state, transition.seat
        if transition.terminated:
            return moves, returns, optimal


def experience(moves: Moves, reward: float, seat: int) -> TokenSequence:
    """Return a seat's moves as an experience with a token a move."""
    n = len(moves)
    return TokenSequence(
        completion_ids=[1] * n,
        logprobs=[-1.0] * n,
        policy_versions=[1] * n,
        finish_reason=FinishReason.STOP,
        result=RewardResult(reward=reward),
        seat=seat,
    )


@pytest.mark.slow
async def test_self_play_raises_the_share_of_optimal_moves() -> None:
    table = Table(np.random.default_rng(1))
    shares = []
    for step in range(STEPS):
        optimal: list[float] = []
        for seed in range(step * PROMPTS, (step + 1) * PROMPTS):
            played: list[Moves] = []
            experiences: list[TokenSequence] = []
            for _ in range(GAMES):
                moves, returns, found = await play(table, seed)
                optimal += found
                for seat in (0, 1):
                    if moves[seat]:
                        played.append(moves[seat])
                        experiences.append(experience(moves[seat], returns[seat], seat))
            group = make_group(group_id="g", prompt="", ground_truth="", prompt_ids=[1], sequences=experiences)
            [trained] = Objective(SETTINGS).with_advantages([Objective(SETTINGS).training_group(group)])
            for sequence, of_seat in zip(trained.sequences, played, strict=True):
                for (heaps, move), advantage in zip(of_seat, sequence.advantages, strict=True):
                    table.learn(heaps, move, advantage)
        shares.append(fmean(optimal))
    # Random legal moves have 0.44. Six seeds of the table end between 0.77 and 0.81.
    assert fmean(shares[:5]) < 0.6
    assert fmean(shares[-20:]) > 0.68
