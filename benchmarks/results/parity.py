"""The rewards of the tiny task, as functions for REWARD_FN; this imports nothing, because reward workers load it."""

from __future__ import annotations

PARITY_TOKENS = 8


def parity(prompt: str, response: str) -> float:
    """Return the share of PARITY_TOKENS that are even digits after a sum, or odd ones after a difference."""
    wanted = "02468" if "+" in prompt else "13579"
    return sum(character in wanted for character in response) / PARITY_TOKENS
