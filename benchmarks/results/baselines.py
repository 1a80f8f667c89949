"""Rejection sampling as advantages: cross entropy on the policy's own right answers, without a group's baseline.

With one update a batch the loss of a token is then -log pi on the chosen completions, and 0 on the others. The trainer
loads these functions by name, as functions of a user's own.
"""

from __future__ import annotations

from torch import Tensor

from services.protocol.rewards import CORRECT
from trainer.algorithm.advantages import Outcomes, has_reward_variance


def right_answers(outcomes: Outcomes) -> Tensor:
    """Return 1 for right answers and 0 for the others (STaR, arXiv:2203.14465, without its rationales)."""
    return (outcomes.rewards >= CORRECT).double()


def best_of_group(outcomes: Outcomes) -> Tensor:
    """Return 1 for the answers with the highest reward of a group whose rewards differ, else 0 (arXiv:2304.06767)."""
    rewards, ids = outcomes.rewards, outcomes.group_ids
    best = (rewards[None, :].where(ids[None, :] == ids[:, None], -float("inf"))).amax(1)
    return ((rewards == best) & has_reward_variance(rewards, ids)).double()
