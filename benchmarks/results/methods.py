"""Parts that compare methods of policy optimisation on a task, with one update a batch and with four."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.results import in_process
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Results, Run, Settings, by_variant
from benchmarks.results.tables import accuracy_note, anchor, comparison, paragraph, ranking
from benchmarks.results.tasks import seeded

BASE = "GRPO"
UPDATES: Settings = {"UPDATES_PER_BATCH": "4"}


def one_update(critic_rate: str) -> dict[str, Settings]:
    """Return the methods that differ with a single update a batch; GRPO has the product's defaults."""
    return {
        BASE: {},
        "Dr. GRPO": {"ADVANTAGE": "dr_grpo", "AGGREGATION": "constant_length"},
        "RLOO": {"ADVANTAGE": "rloo"},
        "REINFORCE++": {"ADVANTAGE": "reinforce"},
        "PPO": {"ADVANTAGE": "gae", "CRITIC_LEARNING_RATE": critic_rate},
        "sequence mean": {"AGGREGATION": "sequence_mean"},
        "dynamic sampling": {"DYNAMIC_SAMPLING_TRIES": "2"},
        "overlong penalty": {"OVERLONG_BUFFER": "4"},
    }


def four_updates(critic_rate: str) -> dict[str, Settings]:
    """Return the methods that differ in the ratio to the policy that sampled, which is 1 in a batch's first update."""
    return {
        BASE: UPDATES,
        "clip-higher": UPDATES | {"CLIP_HIGH": "0.28"},
        "GSPO": UPDATES | {"LOSS": "gspo"},
        "CISPO": UPDATES | {"LOSS": "cispo"},
        "PPO": UPDATES | one_update(critic_rate)["PPO"],
    }


def methods_part(
    name: str, title: str, text: str, task: str, settings: Settings, *, critic_rate: str, seeds: Iterable[int]
) -> Part:
    """Return the part that compares all methods on a task, seed by seed.

    Args:
        name: the part's name.
        title: its heading.
        text: what the reader must know of the task to understand the table.
        task: the task's name.
        settings: its settings.
        critic_rate: learning rate of PPO's critic.
        seeds: the seeds.
    """
    four = f"{task}, four updates a batch"
    methods = ((task, one_update(critic_rate)), (four, four_updates(critic_rate)))
    runs = [
        Run(group, method, seed, seeded(settings | own, seed), in_process.train)
        for seed in seeds
        for group, variants in methods
        for method, own in variants.items()
    ]

    def show(results: Results) -> str:
        general = f"""
        `GRPO` has the product's defaults: advantages divided by the group's deviation, the mean over the tokens of the
        step, a clip of 0.2, one update a batch. Every other row changes what it names; GSPO and CISPO have the clips
        and means of their papers. PPO has a critic of its own with a learning rate of {critic_rate}. The overlong
        penalty grows over the last four of the eight tokens; the table's rewards exclude it.
        """
        parts = [paragraph(text + general), comparison(results, task, BASE), accuracy_note(results)]
        parts.append(curves(name, results, task, "Methods, one update a batch"))
        if any(result.task == four for result in results):
            several = """
            With one update a batch, the ratio to the policy that sampled is 1, and clipping is never reached. Here each
            batch gives four updates, of two groups each.
            """
            parts += [f"### {title}: four updates a batch", paragraph(several), comparison(results, four, BASE)]
            parts.append(curves(f"{name}-four", results, four, "Methods, four updates a batch"))
        return "\n\n".join(parts)

    def summary(results: Results) -> list[str]:
        sentences = []
        for group, updates in ((task, "one update a batch"), (four, "four updates a batch")):
            order = ranking(results, group, BASE)
            if order:
                sentences.append(f"[{title}](#{anchor(title)}) beside GRPO, {updates}: {order}")
        return [*sentences, *_more_updates(results, task, four)]

    return Part(name, title, runs, show, summary)


def _more_updates(results: Results, task: str, four: str) -> list[str]:
    """Return how much GRPO gains from more updates a batch, where both have the same seeds."""
    once, often = (by_variant(results, group).get(BASE, []) for group in (task, four))
    if not once or len(once) != len(often):
        return []
    before, after = (statistics.fmean(run.accuracy or 0.0 for run in runs) for runs in (once, often))
    change = f"{after:.2f} instead of {before:.2f}"
    return [f"With four updates a batch instead of one, GRPO's accuracy on the task {task} is {change}."]
