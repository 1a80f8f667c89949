"""Parts that train one task in many ways: modes, transports, numbers of ranks, number formats, adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from benchmarks.harness import ROOT
from benchmarks.job import Job, kill
from benchmarks.results import in_process, job_runs
from benchmarks.results.equivalence import ACCURACY
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings
from benchmarks.results.tables import accuracy_note, anchor, comparison, paragraph, ranking, spread
from benchmarks.results.tasks import seeded

BASE = "synchronous"
ASYNC = ROOT / "jobgroups/async.yaml"
LORA_RATE_FACTOR = 10.0
"""Learning rate of adapters, as a multiple of the whole model's."""

Train = Callable[[Run], Result]
Ways = Mapping[str, tuple[Settings, Train]]


def ways(task: Settings, *, checkpoint_every: int, killed_at: int) -> dict[str, tuple[Settings, Train]]:
    """Return each way's settings beside the task's, and the function that makes its run.

    Args:
        task: the task's settings.
        checkpoint_every: steps between the checkpoints of the run that is killed.
        killed_at: the step after which its trainer is killed.
    """

    def kill_trainer(job: Job) -> None:
        job.wait(lambda: len(job.steps()) >= killed_at)
        kill(job, "ppo-trainer-0")

    bfloat16 = dict.fromkeys(("COMPUTE_TYPE", "PUBLISH_TYPE", "ENGINE_DTYPE"), "bfloat16")
    lora = {"LORA_RANK": "8", "LEARNING_RATE": str(LORA_RATE_FACTOR * float(task["LEARNING_RATE"]))}
    return {
        BASE: ({}, job_runs.train),
        "one process": ({}, in_process.train),
        "killed and resumed": (
            {"CHECKPOINT_EVERY": str(checkpoint_every)},
            partial(job_runs.train, while_running=kill_trainer),
        ),
        "broadcast": ({"PUBLISH_TRANSPORT": "broadcast"}, job_runs.train),
        "two ranks": ({}, partial(job_runs.train, nodes={"ppo-trainer": 2})),
        "four ranks": ({}, partial(job_runs.train, nodes={"ppo-trainer": 4})),
        "asynchronous, staleness 1": asynchronous(1),
        "asynchronous, staleness 2": asynchronous(2),
        "asynchronous, staleness 4": asynchronous(4),
        "bfloat16": (bfloat16, in_process.train),
        "LoRA": (lora, in_process.train),
    }


def asynchronous(staleness: int) -> tuple[Settings, Train]:
    """Return settings and function of a job group whose groups are so many policy versions old at most."""
    return {"MAX_STALENESS": str(staleness)}, partial(job_runs.train, job_group=ASYNC, nodes={"collector": 1})


def ways_part(
    name: str, title: str, text: str, task: str, settings: Settings, given: Ways, *, seeds: Collection[int]
) -> Part:
    """Return the part that compares ways on a task with the synchronous job group, seed by seed.

    Args:
        name: the part's name.
        title: its heading.
        text: what the task is, and what the reader must know to understand the table.
        task: the task's name.
        settings: its settings.
        given: the ways.
        seeds: the seeds.
    """
    runs = [
        Run(task, way, seed, seeded(settings | own, seed), train)
        for seed in seeds
        for way, (own, train) in given.items()
    ]

    def show(results: Results) -> str:
        parts = [paragraph(f"{text} {staleness(results, given)}"), comparison(results, task, BASE)]
        return "\n\n".join([*parts, accuracy_note(results), curves(name, results, task, title, timed=True)])

    def summary(results: Results) -> list[str]:
        order = ranking(results, task, BASE, ACCURACY)
        return [f"[{title}](#{anchor(title)}), accuracy beside the synchronous job group: {order}"] if order else []

    return Part(name, title, runs, show, summary)


def staleness(results: Results, names: Iterable[str]) -> str:
    """Return a sentence with the mean staleness of each asynchronous way's runs, and its spread over the seeds."""
    found = {
        name: [result.figures["staleness"] for result in results if result.variant == name]
        for name in names
        if name.startswith("asynchronous")
    }
    spreads = ", ".join(f"{spread(values, 1)} of {name[-1]} allowed" for name, values in found.items() if values)
    return f"The staleness that the asynchronous runs had, in versions: {spreads}." if spreads else ""
