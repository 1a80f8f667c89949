"""What counts as a right answer, and pass@k: the same in training's evaluation and in scripts.evaluate."""

from __future__ import annotations

from math import comb

CORRECT = 1.0 - 1e-9
"""A reward of at least this is a right answer."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate that one of k samples is right, from n samples (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {correct} right of {n} samples; needed is 1 <= k <= n")
    return 1.0 - comb(n - correct, k) / comb(n, k)
