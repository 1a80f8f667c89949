"""Methods of policy optimisation on the tiny task, each at a learning rate of its own."""

from __future__ import annotations

from benchmarks.results.methods import Methods, Rates, four_updates, methods_part, one_update
from benchmarks.results.tasks import TINY

CRITIC_RATE = "1e-3"
ONCE = Rates(
    ("1e-3", "2e-3", "4e-3"),
    {
        "GRPO": "4e-3",
        "Dr. GRPO": "2e-3",
        "RLOO": "4e-3",
        "REINFORCE++": "2e-3",
        "PPO": "2e-3",
        "sequence mean": "2e-3",
        "dynamic sampling": "2e-3",
        "SFT on right answers": "1e-3",
        "SFT on the group's best": "4e-3",
    },
)
TEXT = """
The tiny task of the parts above. Rewards in eighths leave few groups without variance until the task is learned, so
that dynamic sampling has little to replace. None of the first answers is right, so that there are none to fine-tune on.
GSPO's clip is made for the mean ratio of long completions.
"""
TABLES = (
    Methods("tiny", TINY, one_update(CRITIC_RATE), ONCE),
    Methods("tiny, four updates a batch", TINY, four_updates(CRITIC_RATE), Rates()),
)
PART = methods_part(
    "methods",
    "Methods on the tiny task",
    TEXT,
    TABLES,
    critic_rate=CRITIC_RATE,
    seeds=range(5),
)
