"""One task trained in many ways: modes, transports, numbers of ranks, number formats, adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from benchmarks.harness import ROOT
from benchmarks.job import Job, kill
from benchmarks.results import in_process, job_runs
from benchmarks.results.comparisons import ACCURACY, accuracy_note, anchor, comparison, paragraph, ranking, spread
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings
from benchmarks.results.tasks import DEMO_TASK, TINY, seeded

BASE = "synchronous"
ASYNC = ROOT / "jobgroups/async.yaml"
LORA_RATE_FACTOR = 10.0
"""Learning rate of adapters, as a multiple of the whole model's."""

Train = Callable[[Run], Result]
Ways = Mapping[str, tuple[Settings, Train]]


def ways(task: Settings, *, checkpoint_every: int, killed_at: int) -> dict[str, tuple[Settings, Train]]:
    """Return each way's settings in addition to the task's, and the function that makes its run.

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
    """Return settings and function of a job group whose groups are at most ``staleness`` policy versions old."""
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


TINY_CHECKPOINT_EVERY, TINY_KILLED_AT = 8, 20
TINY_TEXT = f"""
A model of 0.4M random weights learns to answer sums with even digits and differences with odd ones. A completion has
eight tokens; its reward is the share of them that are digits of the right kind, and it is right if all eight are. All
seeds begin with the same weights, and a step has 64 completions. The base is the synchronous job group with one
trainer node, in float32, which publishes through the volume; a row changes what it names. The first rows run the same
algorithm. `one process` is the same code without services; `killed and resumed` has its trainer killed with SIGKILL
after step {TINY_KILLED_AT}, with a checkpoint every {TINY_CHECKPOINT_EVERY} steps, and its CPU seconds lack those of
the killed process. The others run another algorithm or precision. `bfloat16` runs in one process: compare its CPU
seconds with those of `one process`. An asynchronous run's reward at a step is of completions that an earlier policy
sampled, so a part of its lower mean reward is this lag; the accuracy is that of the last policy. LoRA is compared on
[the demo's task](#equal-ways-on-the-demos-task), because here it would train adapters on random weights: the
embedding, which is also the output head, is frozen, and with it frozen training whole projections learns as little.
"""
TINY_LEFT_OUT = "LoRA"
TINY_PART = ways_part(
    "equal_ways",
    "Equal ways",
    TINY_TEXT,
    "tiny",
    TINY,
    {
        name: way
        for name, way in ways(TINY, checkpoint_every=TINY_CHECKPOINT_EVERY, killed_at=TINY_KILLED_AT).items()
        if name != TINY_LEFT_OUT
    },
    seeds=range(5),
)


DEMO_CHECKPOINT_EVERY, DEMO_KILLED_AT = 2, 5
DEMO_LEFT_OUT = ("asynchronous, staleness 2", "asynchronous, staleness 4", "four ranks")
"""Ways of the tiny task that cost much memory or time here and show nothing further."""
DEMO_TEXT = f"""
SmolLM2-135M, pretrained, with the settings of `examples/demo.env` in float32, 10 steps: one-digit additions, a reward
of 1 for the number alone and of 0 for everything else. The rows are those of the tiny task, and adapters: LoRA has rank
8 and {LORA_RATE_FACTOR:g} times the learning rate, the only rate that was tried. `killed and resumed` has its trainer
killed after step {DEMO_KILLED_AT}, with a checkpoint every {DEMO_CHECKPOINT_EVERY} steps.
"""
DEMO_WAYS = ways(DEMO_TASK, checkpoint_every=DEMO_CHECKPOINT_EVERY, killed_at=DEMO_KILLED_AT)
DEMO_PART = ways_part(
    "equal_ways_demo",
    "Equal ways on the demo's task",
    DEMO_TEXT,
    "demo",
    DEMO_TASK,
    {name: way for name, way in DEMO_WAYS.items() if name not in DEMO_LEFT_OUT},
    seeds=range(3),
)
