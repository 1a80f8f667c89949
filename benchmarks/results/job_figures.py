"""Runs of job groups with what their summary and metrics say beyond rewards: numbers before and after training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from benchmarks.common.job import JOB_GROUP, Job
from benchmarks.results import job_runs
from benchmarks.results.runs import Result, Results, Run, commonest_processor
from benchmarks.results.tables import names, spread, table
from services.protocol.pass_at_k import interval

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
    """Return a figure's means before and after as a table's cell; "" without values."""
    before, after = ([r.figures[figure + end] for r in results if figure + end in r.figures] for end in (BEFORE, AFTER))
    return f"{spread(before)} to {spread(after)}" if before and after else ""


def after(results: Results, figure: str) -> str:
    """Return the mean of a figure that is measured after training only; "" without values."""
    return spread([result.figures[figure + AFTER] for result in results if figure + AFTER in result.figures])


def task_table(results: Results, texts: Mapping[str, str]) -> str:
    """Return a table of tasks: rewards of the first and the last steps, accuracies before and after, cost.

    ``texts`` describes the tasks, in the order of the rows; a task without results has a row that says so.
    """
    processor = commonest_processor(results)
    rows = []
    for task, text in texts.items():
        own = [result for result in results if result.task == task]
        before, after = accuracies(own)
        rows.append(
            (
                f"{task}: {text}",
                len(own),
                spread([run.rewards[0] for run in own]) if own else "not run",
                spread([run.final for run in own]),
                spread(before),
                spread(after),
                own[0].prompts if after else "",
                spread([run.processor_seconds / 60 for run in own if run.processor == processor], 0),
            )
        )
    columns = (
        *("task", "seeds", "reward, first step", "reward, last three steps"),
        *("accuracy before", "accuracy after", "n", "CPU minutes"),
    )
    return f"{table(columns, rows)}\n\nCPU minutes are those of the runs on {processor}."


def accuracies(results: Results) -> tuple[list[float], list[float]]:
    """Return the accuracies before and after training of the runs that have both."""
    name = f"accuracy{BEFORE}"
    both = [(run.figures[name], run.accuracy) for run in results if name in run.figures and run.accuracy is not None]
    return [before for before, _ in both], [after for _, after in both]


def sentences(results: Results, link: str) -> list[str]:
    """Return a sentence for the summary: each task's mean accuracy before and after, by whether a seed has learned.

    A seed has learned if Wilson's 95% intervals of its answers before and after do not overlap.
    """
    learned: dict[bool, list[str]] = {}
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        before, after = accuracies(own)
        if before:
            prompts = own[0].prompts
            risen = sum(
                wilson(last, prompts)[0] > wilson(first, prompts)[1] for first, last in zip(before, after, strict=True)
            )
            change = f"{statistics.fmean(before):.2f} to {statistics.fmean(after):.2f}"
            learned.setdefault(risen > 0, []).append(f"{task} {change} ({risen} of {len(after)} seeds)")
    if not learned:
        return []
    parts = []
    if True in learned:
        parts.append(f"Learned: {names(learned[True])}")
    if False in learned:
        parts.append(f"Not learned by so small a model in these steps: {names(learned[False])}")
    return [f"{link}, mean accuracy on held-out prompts before and after training. {'. '.join(parts)}."]


def wilson(accuracy: float, prompts: int) -> tuple[float, float]:
    """Return the ends of the 95% interval of an accuracy over so many prompts with one answer each."""
    right = round(accuracy * prompts)
    return interval([1.0] * right + [0.0] * (prompts - right))
