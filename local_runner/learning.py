"""The advice for a run of which completions failed, or whose rewards give nothing to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from local_runner.progress import Step

EARLY_STEPS = 3
"""The number of steps after which a run that goes on is told its advice."""
LOOK = "Look at the completions and their rewards (Samples on the run page)"

OVER_LIMIT = frozenset({"limit", "timeout", "reward_over_limit"})
"""Reasons of failure whose completions are wrong answers; the others have no reward."""

REMEDIES = {
    "reward_over_limit": "Make the reward function faster or smaller, or raise its limit.",
    "limit": "Raise the limit, or end the episode before it: an environment does with truncated=True.",
    "timeout": "Raise AGENT_SECONDS, or make the agent faster.",
    "exception": "Correct the agent.",
    "reward_error": "Correct the reward function.",
    "no_call": "",  # its message says it
    "environment": "Correct the environment.",
    "refused": "Correct the environment.",
    "lost": "See the logs of the environment-servers.",
    "server": "See the log of the component that it names.",
    "gateway": "See the logs of gateway and rollout-server.",
    "opponent": "See why the other seat failed in the log of ppo-trainer.",
}
"""The remedy by reason of failure."""


def advice(steps: Sequence[Step]) -> str | None:
    """Return why completions of ``steps`` failed, or why none of the steps changed the model, and what to do.

    Return None if there is nothing to say.
    """
    return " ".join(filter(None, (_nothing_learned(steps), _most_frequent_failure(steps)))) or None


def failed(steps: Sequence[Step]) -> str | None:
    """Return the share of completions that failed, with the reasons, such as ``4/8 (limit)``; None if none did."""
    reasons = _failures(steps)
    if not reasons:
        return None
    without_reward = sum(count for reason, count in reasons.items() if reason not in OVER_LIMIT)
    return f"{reasons.total()}/{_rewards(steps).total() + without_reward} ({counted(reasons)})"


def counted(reasons: Counter[str]) -> str:
    """Return the reasons with their counts, the most frequent first; a single reason alone."""
    return ", ".join(reason if len(reasons) == 1 else f"{reason} {count}" for reason, count in reasons.most_common())


def _nothing_learned(steps: Sequence[Step]) -> str | None:
    if not steps or any(step.trained_tokens != 0 for step in steps):
        return None
    rewards = _rewards(steps)
    count = f"{rewards.total()} completions"
    if not rewards:
        what, remedy = "no completion could be scored", LOOK
    elif set(rewards) == {0.0}:
        what = f"none of {count} got a reward; all have 0"
        remedy = f"{LOOK}, try the reward function on a right answer, and ask in the prompt for the form that it reads"
    else:
        what = f"within each prompt's group, all rewards are equal ({count})"
        remedy = f"{LOOK}: the prompts may be too easy or too hard, or the reward may not tell answers apart"
    in_steps = f"in {len(steps)} steps" if len(steps) > 1 else "in the step"
    # Rewards of the others say little where completions have failed.
    return f"The model has learned nothing {in_steps}: {what}." + ("" if _failures(steps) else f" {remedy}.")


def _most_frequent_failure(steps: Sequence[Step]) -> str | None:
    reasons = _failures(steps)
    if not reasons:
        return None
    [(most, _)] = reasons.most_common(1)
    said = next(said for step in steps for reason, _, said in step.failures if reason == most)
    remedy = REMEDIES.get(most, f"{LOOK}.")
    what = "have no reward, except that those over a limit are wrong"
    return f"Failed completions {what}: {failed(steps)}. The most frequent failure: {said}. {remedy}".rstrip()


def _rewards(steps: Sequence[Step]) -> Counter[float]:
    """Return the number of completions by reward."""
    return sum((Counter(dict(step.reward_counts)) for step in steps), Counter())


def _failures(steps: Sequence[Step]) -> Counter[str]:
    """Return the number of failed completions by reason."""
    return sum((Counter({reason: count for reason, count, _ in step.failures}) for step in steps), Counter())
