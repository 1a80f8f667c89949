"""Training runs of whole job groups under the local runner, with all of their processes on this machine.

Their summary and metrics say more than rewards: figures before and after training.
"""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.harness import ROOT
from benchmarks.job import JOB_GROUP, Job, Steps, running
from benchmarks.results.comparisons import names, spread
from benchmarks.results.runs import Result, Results, Run, commonest_processor, result_of
from benchmarks.results.tasks import with_model
from services.protocol.rewards import interval

Figures = dict[str, float]

BEFORE, AFTER = "_before", "_after"
"""Endings of a figure's names at the first and at the last step or evaluation."""


def train(
    run: Run,
    *,
    job_group: Path = JOB_GROUP,
    nodes: Mapping[str, int] | None = None,
    while_running: Callable[[Job], None] = lambda _: None,
    columns: Sequence[str] = (),
    more: Callable[[Job], Figures] = lambda _: {},
) -> Result:
    """Run a job group by the run's settings to its end, and return the measurements.

    Args:
        run: the run; its settings go to every task.
        job_group: the file of the job group.
        nodes: numbers of nodes in addition to one trainer node and one rollout node.
        while_running: called once the job has started, such as to kill a node.
        columns: columns of metrics.jsonl that become figures, from the first and the last step that have them.
        more: returns further figures of the finished job.
    """
    before = processor_seconds()
    counts = {"ppo-trainer": 1, "rollout-server": 1, **(nodes or {})}
    with TemporaryDirectory() as directory, with_model(run.settings) as settings:
        # All processes compute in turn on a core each, and sum alike wherever they run.
        variables = settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with running(Path(directory), job_group, variables, counts) as job:
            while_running(job)
            job.wait(lambda: False)
            result = measured(run, job.steps())
            result.figures |= accuracy_before(job) | first_and_last(job, columns) | more(job)
    result.processor_seconds = processor_seconds() - before
    return result


def measured(run: Run, steps: Steps) -> Result:
    """Return the measurements in a run's metrics.jsonl."""
    result = result_of(run)
    for step in steps:
        result.rewards.append(step["reward_mean"])
        result.tokens.append(int(step["completion_tokens"]))
        result.seconds.append(step["seconds_step"] - step.get("seconds_evaluate", 0.0))
    last, samples = steps[-1], int(run.settings.get("EVAL_SAMPLES", "0"))
    name = f"avg_at_{samples}" if samples else "accuracy"
    if name in last:
        result.accuracy, result.accuracy_error = last[name], last[f"{name}_stderr"]
        result.prompts, result.samples = int(last["eval_prompts"] - last["eval_left_out"]), samples
    result.figures["staleness"] = sum(step["staleness_mean"] for step in steps) / len(steps)
    return result


def processor_seconds() -> float:
    """Return the processor time of all processes that this one has started and seen end, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def accuracy_before(job: Job) -> Figures:
    """Return the greedy accuracy on held-out prompts before the first step."""
    found = orjson.loads((job.run_dir / "summary.json").read_bytes()).get("accuracy_before")
    return {} if found is None else {f"accuracy{BEFORE}": found}


def first_and_last(job: Job, columns: Sequence[str]) -> Figures:
    """Return each column's value of the first and of the last step that have it."""
    found: Figures = {}
    for column in columns:
        values = [step[column] for step in job.steps() if step.get(column) is not None]
        if values:
            found |= {column + BEFORE: values[0], column + AFTER: values[-1]}
    return found


def of_last_step(job: Job, columns: Sequence[str]) -> Figures:
    """Return each column's value of the last step."""
    last = job.steps()[-1]
    return {column + AFTER: last[column] for column in columns if last.get(column) is not None}


def before(results: Results, figure: str, task: str = "") -> str:
    """Return a figure's mean of the first step, or before training, over a task's or all runs; "" without values."""
    return _spread_of(results, figure + BEFORE, task)


def after(results: Results, figure: str, task: str = "") -> str:
    """Return a figure's mean of the last step, or after training, over a task's or all runs; "" without values."""
    return _spread_of(results, figure + AFTER, task)


def change(results: Results, figure: str, task: str = "") -> str:
    """Return a figure's means before and after training."""
    return f"{before(results, figure, task)} to {after(results, figure, task)}"


def _spread_of(results: Results, figure: str, task: str) -> str:
    return spread([run.figures[figure] for run in results if task in ("", run.task) and figure in run.figures])


def task_row(results: Results, task: str) -> str:
    """Return the cells of a task: seeds, rewards of the first and the last steps, accuracies, prompts, CPU minutes."""
    runs = [result for result in results if result.task == task]
    if not runs:
        return " | ".join(["0", "not run", *[""] * 5])
    before, after = accuracies(runs)
    processor = commonest_processor(results)
    cells = (
        len(runs),
        spread([run.rewards[0] for run in runs]),
        spread([run.final for run in runs]),
        spread(before),
        spread(after),
        runs[0].prompts if after else "",
        spread([run.processor_seconds / 60 for run in runs if run.processor == processor], 0),
    )
    return " | ".join(map(str, cells))


def accuracies(results: Results) -> tuple[list[float], list[float]]:
    """Return the accuracies before and after training of the runs that have both."""
    name = f"accuracy{BEFORE}"
    both = [(run.figures[name], run.accuracy) for run in results if name in run.figures and run.accuracy is not None]
    return [before for before, _ in both], [after for _, after in both]


def learned(results: Results, *tasks: str) -> str:
    """Return the accuracies of the tasks, or of all, before and after, by whether a seed has learned; "" without any.

    A seed has learned if the 95% interval of its gain is above 0.
    """
    sentences: dict[bool, list[str]] = {}
    for task in tasks or dict.fromkeys(result.task for result in results):
        runs = [result for result in results if result.task == task]
        before, after = accuracies(runs)
        if before:
            prompts = runs[0].prompts
            risen = sum(least_gain(first, last, prompts) > 0 for first, last in zip(before, after, strict=True))
            change = f"{statistics.fmean(before):.2f} to {names(f'{accuracy:.2f}' for accuracy in after)}"
            highest = max(max(run.rewards) for run in runs)
            text = f"in {risen} of {len(after)} seeds" if risen else f"highest reward of a step {highest:.2f}"
            sentences.setdefault(risen > 0, []).append(f"{task} {change} ({text})")
    parts = [
        f"**{heading}:** {'; '.join(sentences[is_learned])}."
        for is_learned, heading in ((True, "Learned"), (False, "Not learned"))
        if is_learned in sentences
    ]
    return " ".join(parts)


def least_gain(before: float, after: float, prompts: int) -> float:
    """Return the lower end of the 95% interval of ``after - before``, accuracies over ``prompts`` prompts each.

    It is Newcombe's hybrid score interval for independent proportions (Statistics in Medicine 17, 1998, method 10),
    which is wide for answers to the same prompts.
    """
    lower, upper = wilson(after, prompts)[0], wilson(before, prompts)[1]
    return after - before - math.hypot(after - lower, upper - before)


def wilson(accuracy: float, prompts: int) -> tuple[float, float]:
    """Return the ends of the 95% interval of an accuracy over ``prompts`` prompts with one answer each."""
    right = round(accuracy * prompts)
    return interval([1.0] * right + [0.0] * (prompts - right))
