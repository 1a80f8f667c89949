"""Methods of policy optimisation on the tiny task, with one update a batch and with four."""

from __future__ import annotations

import statistics

from benchmarks.results import in_process
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Results, Run, Settings, by_variant
from benchmarks.results.tables import accuracy_note, comparison, paragraph, ranking
from benchmarks.results.tasks import TINY, seeded

SEEDS = range(5)
BASE = "GRPO"

METHODS: dict[str, Settings] = {
    BASE: {},
    "Dr. GRPO": {"ADVANTAGE": "dr_grpo", "AGGREGATION": "constant_length"},
    "RLOO": {"ADVANTAGE": "rloo"},
    "REINFORCE++": {"ADVANTAGE": "reinforce"},
    "PPO": {"ADVANTAGE": "gae", "CRITIC_LEARNING_RATE": "1e-3"},
    "sequence mean": {"AGGREGATION": "sequence_mean"},
    "dynamic sampling": {"DYNAMIC_SAMPLING_TRIES": "2"},
    "overlong penalty": {"OVERLONG_BUFFER": "4"},
}
"""Methods that differ with a single update a batch; GRPO has the product's defaults, the token mean among them."""
UPDATES: Settings = {"UPDATES_PER_BATCH": "4"}
RATIO_METHODS: dict[str, Settings] = {
    BASE: UPDATES,
    "clip-higher": UPDATES | {"CLIP_HIGH": "0.28"},
    "GSPO": UPDATES | {"LOSS": "gspo"},
    "CISPO": UPDATES | {"LOSS": "cispo"},
    "PPO": UPDATES | METHODS["PPO"],
}
"""Methods that differ in the ratio to the policy that sampled, which is 1 in a batch's first update."""

ONE, FOUR = "tiny", "tiny, four updates a batch"
RUNS = [
    Run(task, name, seed, seeded(TINY | settings, seed), in_process.train)
    for seed in SEEDS
    for task, methods in ((ONE, METHODS), (FOUR, RATIO_METHODS))
    for name, settings in methods.items()
]


def show(results: Results) -> str:
    """Return the section: tables and curves of one and of four updates a batch."""
    text = """
    The tiny task of the part above. `GRPO` has the product's defaults: advantages divided by the group's deviation,
    the mean over the tokens of the step, a clip of 0.2, one update a batch. Every other row changes what it names. PPO
    has a critic of its own with a learning rate of 1e-3. Rewards in eighths leave hardly a group without variance, so
    that dynamic sampling has next to nothing to replace. The overlong penalty falls over the last four of eight
    tokens, and the task rewards eight tokens: here it teaches the opposite. Rewards are those without the penalty.
    """
    four = """
    With one update a batch, the ratio to the policy that sampled is 1, and clipping is never reached. Here each batch
    gives four updates, of two groups each.
    """
    return "\n\n".join(
        [
            paragraph(text),
            comparison(results, ONE, BASE),
            accuracy_note(results),
            curves("methods", results, ONE, "Methods, one update a batch"),
            "### Four updates a batch",
            paragraph(four),
            comparison(results, FOUR, BASE),
            curves("methods-four", results, FOUR, "Methods, four updates a batch"),
        ]
    )


def summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    return [
        *(
            f"[Methods](#methods-on-the-tiny-task) beside GRPO on the tiny task, {updates}. "
            f"{ranking(results, task, BASE)}"
            for task, updates in ((ONE, "one update a batch"), (FOUR, "four updates a batch"))
            if ranking(results, task, BASE)
        ),
        *_more_updates(results),
    ]


def _more_updates(results: Results) -> list[str]:
    """Return how much GRPO gains from more updates a batch, where both have the same seeds."""
    one, four = (by_variant(results, task).get(BASE, []) for task in (ONE, FOUR))
    if not one or len(one) != len(four):
        return []
    before, after = (statistics.fmean(run.accuracy or 0.0 for run in runs) for runs in (one, four))
    return [f"From one update a batch to four, GRPO's accuracy on the tiny task goes from {before:.2f} to {after:.2f}."]


PART = Part("methods", "Methods on the tiny task", RUNS, show, summary)
