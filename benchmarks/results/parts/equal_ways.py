"""Equal ways give equal results: modes, transports, numbers of ranks, resumption, number formats on one task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.common.harness import ROOT
from benchmarks.common.job import Job, kill
from benchmarks.results import in_process, job_runs
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings
from benchmarks.results.tables import accuracy_note, comparison, paragraph, ranking
from benchmarks.results.tasks import TINY, seeded

SEEDS = range(5)
TASK = "tiny"
BASE = "synchronous"
ASYNC = ROOT / "jobgroup-async.yaml"
CHECKPOINT_EVERY, KILLED_AT = 8, 20
LORA_RATE_FACTOR = 10.0
"""Learning rate of adapters, as a multiple of the whole model's."""


def kill_trainer(job: Job) -> None:
    """Kill every process of the trainer with SIGKILL between two checkpoints."""
    job.wait(lambda: len(job.steps()) >= KILLED_AT)
    kill(job, "ppo-trainer-0")


Train = Callable[[Run], Result]


def asynchronous(staleness: int) -> tuple[Settings, Train]:
    """Return settings and function of a job group whose groups are so many policy versions old at most."""
    return {"MAX_STALENESS": str(staleness)}, partial(job_runs.train, job_group=ASYNC, nodes={"collector": 1})


WAYS: dict[str, tuple[Settings, Train]] = {
    BASE: ({}, job_runs.train),
    "one process": ({}, in_process.train),
    "asynchronous, staleness 1": asynchronous(1),
    "asynchronous, staleness 2": asynchronous(2),
    "asynchronous, staleness 4": asynchronous(4),
    "killed and resumed": (
        {"CHECKPOINT_EVERY": str(CHECKPOINT_EVERY)},
        partial(job_runs.train, while_running=kill_trainer),
    ),
    "broadcast": ({"PUBLISH_TRANSPORT": "broadcast"}, job_runs.train),
    "two ranks": ({}, partial(job_runs.train, nodes={"ppo-trainer": 2})),
    "four ranks": ({}, partial(job_runs.train, nodes={"ppo-trainer": 4})),
    "replay": ({"REPLAY_GROUPS": "2"}, in_process.train),
    "bfloat16": (
        {"COMPUTE_TYPE": "bfloat16", "PUBLISH_TYPE": "bfloat16", "ENGINE_DTYPE": "bfloat16"},
        in_process.train,
    ),
    "LoRA": (
        {"LORA_RANK": "8", "LEARNING_RATE": str(LORA_RATE_FACTOR * float(TINY["LEARNING_RATE"]))},
        in_process.train,
    ),
}

RUNS = [
    Run(TASK, name, seed, seeded(TINY | settings, seed), train)
    for seed in SEEDS
    for name, (settings, train) in WAYS.items()
]


def show(results: Results) -> str:
    """Return the section: task, table and curves."""
    stale = [
        f"{result.figures['staleness']:.1f}"
        for name in WAYS
        if name.startswith("asynchronous")
        for result in results
        if result.variant == name and result.seed == SEEDS[0]
    ]
    text = f"""
    A model of 0.4M random weights learns to answer sums with even digits and differences with odd ones, 64 completions
    a step. The base is the synchronous job group with one trainer node, in float32, which publishes through the
    volume; every other row changes one thing. `one process` is the same code without services. `killed and resumed`
    has its trainer killed with SIGKILL after step {KILLED_AT}, with a checkpoint every {CHECKPOINT_EVERY} steps.
    `replay` trains on two replayed groups beside eight fresh ones. LoRA has rank 8 and {LORA_RATE_FACTOR:g} times the
    learning rate. Mean staleness of the asynchronous runs with seed {SEEDS[0]}: {", ".join(stale)} versions. A group
    that is k versions old trains the policy k steps late. At a learning rate by which 40 steps are the whole run, this
    costs mean reward at equal generated tokens; the asynchronous mode pays it to generate while it trains.
    """
    plot = curves("equal_ways", results, TASK, "One task in equal ways")
    return "\n\n".join([paragraph(text), comparison(results, TASK, BASE), accuracy_note(results), plot])


def summary(results: Results) -> list[str]:
    """Return the sentence of the summary."""
    order = ranking(results, TASK, BASE)
    return [f"[Equal ways](#equal-ways-give-equal-results) beside the synchronous job group. {order}"] if order else []


PART = Part("equal_ways", "Equal ways give equal results", RUNS, show, summary)
