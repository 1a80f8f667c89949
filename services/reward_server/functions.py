"""The built-in reward functions that need no worker: exact, cheap, and safe on any text."""

from __future__ import annotations


class UnscorableError(Exception):
    """A reward cannot be given; the message says why."""


def exact_match(response: str, ground_truth: str) -> float:
    """1 where response and ground truth are the same text but for white space around them, else 0."""
    return float(response.strip() == ground_truth.strip())


def overlong(completion_tokens: int | None, max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

    0 up to ``max_tokens - buffer_tokens``, then linearly down to -1 at ``max_tokens``, and -1 beyond.
    """
    if completion_tokens is None:
        raise UnscorableError("overlong needs completion_tokens beside the response")
    over = completion_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))
