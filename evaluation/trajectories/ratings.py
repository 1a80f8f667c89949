"""Tables of a run: mean returns of policies that play alone, and ratings of policies that play each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

METHOD = "Bradley-Terry on the Elo scale, mean 1500"
PRIOR_WINS = 0.5
"""Wins that each side of every pair is given beforehand, so that a policy that always wins has a finite rating."""
ITERATIONS = 1000

Games = Mapping[tuple[str, ...], Sequence[Sequence[float]]]
"""By lineup, the return of each seat in each episode."""


def mean_returns(games: Games, steps: Mapping[tuple[str, ...], int]) -> list[dict[str, Any]]:
    """Return a row a policy: episodes, steps, mean return and its standard error; for environments of one seat."""
    rows = []
    for lineup, returns in games.items():
        values = np.asarray(returns, float).reshape(-1)
        error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        mean = float(values.mean()) if len(values) else None
        rows.append({"policy": lineup[0], "episodes": len(values), "steps": steps[lineup]})
        rows[-1] |= {"mean_return": mean, "standard_error": error}
    return rows


def ratings(games: Games) -> list[dict[str, Any]]:
    """Return a row a policy, the best first: rating, its standard error, games, wins, draws, losses, mean return.

    In each game every pair of seats is compared: the higher return wins, and equal returns share the win. The ratings
    are the maximum of the Bradley-Terry likelihood with PRIOR_WINS, found by Hunter's minorization-maximization
    (2004, equation 3); the errors are those of its Fisher information.
    """
    names = sorted({name for lineup in games for name in lineup})
    wins = np.zeros((len(names), len(names)))
    records: dict[str, list[float]] = {name: [] for name in names}
    results: dict[str, list[float]] = {name: [] for name in names}
    for lineup, episodes in games.items():
        for returns in episodes:
            for name, value in zip(lineup, returns, strict=True):
                records[name].append(value)
            for a, b in itertools.permutations(range(len(lineup)), 2):
                score = 0.5 + 0.5 * float(np.sign(returns[a] - returns[b]))
                results[lineup[a]].append(score)
                if lineup[a] != lineup[b]:
                    wins[names.index(lineup[a]), names.index(lineup[b])] += score
    elo, errors = bradley_terry(wins)
    rows = [
        {
            "policy": name,
            "rating": float(elo[place]),
            "standard_error": float(errors[place]),
            "games": len(results[name]),
            "wins": results[name].count(1.0),
            "draws": results[name].count(0.5),
            "losses": results[name].count(0.0),
            "mean_return": float(np.mean(records[name])) if records[name] else None,
        }
        for place, name in enumerate(names)
    ]
    return sorted(rows, key=lambda row: -row["rating"])


def bradley_terry(wins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ratings and their standard errors [players] from ``wins`` [players, players], of rows over columns."""
    wins = wins + PRIOR_WINS * ((wins + wins.T) > 0)
    played = wins + wins.T
    strength = np.ones(len(wins))
    for _ in range(ITERATIONS):
        expected = played / (strength[:, None] + strength[None, :])
        strength = np.where(expected.sum(1) > 0, wins.sum(1) / np.maximum(expected.sum(1), 1e-300), 1.0)
        strength /= np.exp(np.log(strength).mean())
    information = played * np.outer(strength, strength) / (strength[:, None] + strength[None, :]) ** 2
    laplacian = np.diag(information.sum(1)) - information
    scale = 400 / np.log(10)
    return 1500 + scale * np.log(strength), scale * np.sqrt(np.diag(np.linalg.pinv(laplacian)))
