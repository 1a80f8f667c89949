"""Methods of policy optimisation on the demo's task: a pretrained model and a reward of 0 or 1."""

from __future__ import annotations

from benchmarks.results import in_process
from benchmarks.results.parts.methods import BASE, METHODS
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Results, Run, Settings
from benchmarks.results.tables import accuracy_note, comparison, paragraph, ranking
from benchmarks.results.tasks import DEMO_TASK, seeded

SEEDS = range(3)
TASK = "demo"
LORA_RATE_FACTOR = 10.0
VARIANTS: dict[str, Settings] = METHODS | {
    "GSPO, four updates": {"LOSS": "gspo", "UPDATES_PER_BATCH": "4"},
    "LoRA": {"LORA_RANK": "8", "LEARNING_RATE": str(LORA_RATE_FACTOR * float(DEMO_TASK["LEARNING_RATE"]))},
    "replay": {"REPLAY_GROUPS": "2"},
}
RUNS = [
    Run(TASK, name, seed, seeded(DEMO_TASK | settings, seed), in_process.train)
    for seed in SEEDS
    for name, settings in VARIANTS.items()
]


def show(results: Results) -> str:
    """Return the section: table and curves."""
    text = """
    SmolLM2-135M, pretrained, with the settings of `demo.env`: one-digit additions, a reward of 1 for the number alone
    and of 0 for everything else. The rows are those of the tiny task; LoRA has rank 8 and ten times the learning rate,
    replay two groups a step.
    """
    plot = curves("methods_demo", results, TASK, "Methods on the demo's task")
    return "\n\n".join([paragraph(text), comparison(results, TASK, BASE), accuracy_note(results), plot])


def summary(results: Results) -> list[str]:
    """Return the sentence of the summary."""
    order = ranking(results, TASK, BASE)
    return [f"[On the demo's task](#methods-on-the-demos-task), beside GRPO. {order}"] if order else []


PART = Part("methods_demo", "Methods on the demo's task", RUNS, show, summary)
