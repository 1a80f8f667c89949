"""The rewards at the beginning and at the end of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

AVERAGED_STEPS = 3
"""Most steps at the start and at the end over which rewards are averaged."""


def first_and_last(rewards: Sequence[float]) -> dict[str, float | int | None]:
    """Return the mean rewards of the first and of the last steps, and the number of steps that each averages.

    No step is in both means. A single step has a first mean only; without steps there is none.
    """
    steps = max(min(AVERAGED_STEPS, len(rewards) // 2), 1)
    return {
        "reward_first": statistics.fmean(rewards[:steps]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-steps:]) if len(rewards) > 1 else None,
        "reward_steps": min(steps, len(rewards)),
    }
