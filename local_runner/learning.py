"""The advice for a run in which no step changed the model, because its rewards give nothing to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from local_runner.progress import Step

EARLY_STEPS = 3
"""The number of steps after which a run that goes on is told so."""
LOOK = "Look at the completions and their rewards (Samples on the run page)"


def nothing_learned(steps: Sequence[Step]) -> str | None:
    """Return why none of ``steps`` changed the model, and what to try; None if one did, or there are no steps."""
    if not steps or any(step.trained_tokens != 0 for step in steps):
        return None
    rewards: Counter[float] = Counter()
    for step in steps:
        rewards.update(dict(step.reward_counts))
    count = f"{rewards.total()} completions"
    if not rewards:
        what = "no completion could be scored"
        remedy = f"{LOOK}: the reason beside each says what the reward function raised."
    elif set(rewards) == {0.0}:
        what = f"none of {count} got a reward; all have 0"
        remedy = f"{LOOK}, try the reward function on a right answer, and ask in the prompt for the form that it reads."
    else:
        what = f"within each prompt's group, all rewards are equal ({count})"
        remedy = f"{LOOK}: the prompts may be too easy or too hard, or the reward may not tell answers apart."
    in_steps = f"in {len(steps)} steps" if len(steps) > 1 else "in the step"
    return f"The model has learned nothing {in_steps}: {what}. {remedy}"
