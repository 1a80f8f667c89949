"""Replay on the tiny and on the demo's task, at equal generated tokens and at equal processor time."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.results import in_process
from benchmarks.results.in_process import STEP_SECONDS
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Results, Run, Settings, by_variant, commonest_processor
from benchmarks.results.tables import accuracy_note, anchor, comparison, paragraph, ranking, spread, table
from benchmarks.results.tasks import DEMO_TASK, TINY, seeded

TITLE = "Replay"
BASE = "no replay"
GROUPS, BOUNDS = ("4", "8"), ("0.1", "1")


@dataclass(frozen=True)
class Task:
    """A task with and without replay."""

    settings: Settings
    seeds: range
    steps: dict[str, str] = field(default_factory=dict)
    """For each number of replayed groups, the steps that take the processor time of the base's."""

    def variants(self) -> dict[str, Settings]:
        """Return the settings of each variant beside the task's."""
        replayed: dict[str, Settings] = {
            f"{groups} groups, KL to {bound}": {"REPLAY_GROUPS": groups, "REPLAY_MAX_KL": bound}
            for groups in GROUPS
            for bound in BOUNDS
        }
        shorter: dict[str, Settings] = {
            f"{groups} groups, KL to {BOUNDS[-1]}, {steps} steps": {
                "REPLAY_GROUPS": groups,
                "REPLAY_MAX_KL": BOUNDS[-1],
                "MAX_STEPS": steps,
            }
            for groups, steps in self.steps.items()
        }
        return {BASE: {}, **replayed, **shorter}


SHORTER = {"4": "31", "8": "26"}
"""Steps of the tiny task that take the time of its 40 without replay."""
TASKS = {
    "tiny": Task(TINY, range(5), SHORTER),
    "tiny, learning rate 2e-3": Task(TINY | {"LEARNING_RATE": "2e-3"}, range(5), SHORTER),
    "demo": Task(DEMO_TASK, range(3)),
}
RUNS = [
    Run(name, variant, seed, seeded(task.settings | settings, seed), in_process.train)
    for name, task in TASKS.items()
    for seed in task.seeds
    for variant, settings in task.variants().items()
]


def costs(results: Results, task: str) -> str:
    """Return a table of the steps' processor time and the groups that were replayed, by variant."""
    processor = commonest_processor(results)
    rows = []
    for variant, own in by_variant(results, task).items():
        seconds = [run.figures[STEP_SECONDS] for run in own if run.processor == processor]
        counts = [spread([run.figures[name] for run in own], 0) for name in ("replayed", "left_out")]
        rows.append((variant, len(own[0].rewards), spread(seconds, 1), *counts))
    return table(("", "steps", "CPU seconds of the steps", "groups replayed", "left out by their KL"), rows)


def show(results: Results) -> str:
    """Return the section: each task's comparisons and costs."""
    text = """
    Each step trains on 8 fresh groups, and on 4 or 8 groups of earlier steps beside them, drawn by priority from the
    last 8 policy versions. `KL to` is `REPLAY_MAX_KL`: a replayed group whose policy is further from the present one
    is left out. Rows with as many steps as the base generate as many tokens. Rows with fewer steps, on the tiny task,
    take somewhat more processor time than the base's steps, because the forward and backward passes of replayed groups
    take time. A mean reward over the steps is then one over about that time. Where generation takes a larger part of a
    step than here, replay costs less. The tiny task has two learning rates, its own and that of the highest accuracy
    in its [grid](#hyperparameters-of-the-tiny-task), because more groups also make a step larger.
    """
    parts = [paragraph(text)]
    for number, task in enumerate(task for task in TASKS if any(result.task == task for result in results)):
        own = [result for result in results if result.task == task]
        parts += [f"### {TITLE}: {task}", comparison(results, task, BASE), accuracy_note(own), costs(results, task)]
        parts.append(curves(f"replay-{number}", results, task, f"{TITLE}: {task}"))
    return "\n\n".join(parts)


def summary(results: Results) -> list[str]:
    """Return a sentence for each task."""
    return [
        f"[{TITLE}](#{anchor(TITLE)}) on the task {task}, mean reward beside {BASE}: {order}"
        for task in TASKS
        if (order := ranking(results, task, BASE))
    ]


PART = Part("replay", TITLE, RUNS, show, summary)
