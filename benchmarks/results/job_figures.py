"""Runs of job groups with what their summary and metrics say beyond rewards: numbers before and after training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from benchmarks.common.harness import spread
from benchmarks.common.job import JOB_GROUP, Job
from benchmarks.results import job_runs
from benchmarks.results.runs import Result, Results, Run
from benchmarks.results.tables import table

Figures = dict[str, float]

BEFORE, AFTER = "_before", "_after"
"""Endings of a figure's names at the first and at the last step or evaluation."""


def train(
    run: Run,
    *,
    job_group: Path = JOB_GROUP,
    nodes: Mapping[str, int] | None = None,
    columns: Sequence[str] = (),
    more: Callable[[Job], Figures] = lambda _: {},
) -> Result:
    """Run a job group to its end, and return its measurements with figures.

    Args:
        run: the run.
        job_group: the file of the job group.
        nodes: numbers of nodes beside one trainer node and one rollout node.
        columns: columns of metrics.jsonl that become figures, from the first and the last step that have them.
        more: returns further figures of the finished job.
    """
    figures: Figures = {}

    def finish(job: Job) -> None:
        job.wait(lambda: False)
        figures.update(accuracy_before(job) | first_and_last(job, columns) | more(job))

    result = job_runs.train(run, job_group=job_group, nodes=nodes, while_running=finish)
    result.figures |= figures
    return result


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


def before_and_after(results: Results, figure: str) -> str:
    """Return a figure's medians before and after as a table's cell; "" without values."""
    before, after = ([r.figures[figure + end] for r in results if figure + end in r.figures] for end in (BEFORE, AFTER))
    return f"{spread(before)} to {spread(after)}" if before and after else ""


def after(results: Results, figure: str) -> str:
    """Return the median of a figure that is measured after training only; "" without values."""
    return spread([result.figures[figure + AFTER] for result in results if figure + AFTER in result.figures])


def task_table(results: Results, texts: Mapping[str, str]) -> str:
    """Return a table of tasks: rewards of the first and the last steps, accuracies before and after, cost.

    ``texts`` describes the tasks, in the order of the rows; a task without results has a row that says so.
    """
    rows = []
    for task, text in texts.items():
        own = [result for result in results if result.task == task]
        greedy = [result for result in own if result.accuracy is not None and f"accuracy{BEFORE}" in result.figures]
        rows.append(
            (
                f"{task}: {text}",
                len(own),
                f"{spread([r.rewards[0] for r in own])} to {spread([r.final for r in own])}" if own else "not run",
                f"{spread([r.figures[f'accuracy{BEFORE}'] for r in greedy])} to "
                f"{spread([r.accuracy for r in greedy if r.accuracy is not None])}"
                if greedy
                else "",
                greedy[0].prompts if greedy else "",
                spread([r.accuracy_error for r in greedy if r.accuracy_error is not None]),
                spread([r.processor_seconds / 60 for r in own], 0),
            )
        )
    columns = ("task", "seeds", "reward, first to last", "held-out accuracy", "n", "its error", "CPU minutes")
    return table(columns, rows)


def sentences(results: Results, link: str) -> list[str]:
    """Return a sentence for the summary: each task's accuracy before and after, medians over its seeds."""
    parts = []
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task and result.accuracy is not None]
        before = [result.figures[f"accuracy{BEFORE}"] for result in own if f"accuracy{BEFORE}" in result.figures]
        after = [result.accuracy for result in own if result.accuracy is not None]
        if before and after:
            seeds = f"{len(after)} seed{'s' if len(after) > 1 else ''}"
            parts.append(f"{task} {statistics.median(before):.2f} to {statistics.median(after):.2f} ({seeds})")
    return [f"{link}, held-out accuracy before and after training: {'; '.join(parts)}."] if parts else []
