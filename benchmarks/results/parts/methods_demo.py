"""Methods of policy optimisation on the demo's task: a pretrained model and a reward of 0 or 1."""

from __future__ import annotations

from benchmarks.results.methods import Methods, Rates, four_updates, methods_part, one_update
from benchmarks.results.tasks import DEMO_TASK

CRITIC_RATE = "1e-5"
SAME_AS_RIGHT = "SFT on the group's best"
"""Rewards are 0 or 1, so that the best of a group are its right answers, but for groups that are all right."""
TEXT = """
SmolLM2-135M, pretrained, with the settings of `examples/demo.env`, 10 steps: one-digit additions, a reward of 1 for the
number alone and of 0 for everything else. All methods have the task's own learning rate of 2e-5, the best by mean
reward of the [grid](#hyperparameters-of-the-demo) for most settings. Once most groups are all right or all wrong, they
have no variance. Dynamic sampling replaces them, at the cost of their tokens. The overlong penalty grows over the last
four of the eight tokens; the table's rewards exclude it.
"""
METHODS = {name: settings for name, settings in one_update(CRITIC_RATE).items() if name != SAME_AS_RIGHT}
TABLES = (
    Methods("demo", DEMO_TASK, METHODS | {"overlong penalty": {"OVERLONG_BUFFER": "4"}}, Rates()),
    Methods("demo, four updates a batch", DEMO_TASK, four_updates(CRITIC_RATE), Rates()),
)
PART = methods_part(
    "methods_demo",
    "Methods on the demo's task",
    TEXT,
    TABLES,
    critic_rate=CRITIC_RATE,
    seeds=range(3),
)
