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
from benchmarks.results.comparisons import names, spread, table
from benchmarks.results.runs import Result, Results, Run, commonest_processor, result_of
from benchmarks.results.tasks import with_model
from services.protocol.rewards import interval


def train(
    run: Run,
    *,
    job_group: Path = JOB_GROUP,
    nodes: Mapping[str, int] | None = None,
    while_running: Callable[[Job], None] | None = None,
) -> Result:
    """Run a job group by the run's settings to its end, and return the measurements.

    Args:
        run: the run; its settings go to every task.
        job_group: the file of the job group.
        nodes: numbers of nodes in addition to one trainer node and one rollout node.
        while_running: called once the job has started, such as to kill a node.
    """
    before = _processor_seconds()
    counts = {"ppo-trainer": 1, "rollout-server": 1, **(nodes or {})}
    with TemporaryDirectory() as directory, with_model(run.settings) as settings:
        # All processes compute in turn on a core each, and sum alike wherever they run.
        given = settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with running(Path(directory), job_group, given, counts) as job:
            if while_running is not None:
                while_running(job)
            job.wait(lambda: False)
            result = measured(run, job.steps())
    result.processor_seconds = _processor_seconds() - before
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


def _processor_seconds() -> float:
    """Return the processor time of all processes that this one has started and seen end, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Figures = dict[str, float]

BEFORE, AFTER = "_before", "_after"
"""Endings of a figure's names at the first and at the last step or evaluation."""


def train_with_figures(
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
        nodes: numbers of nodes in addition to one trainer node and one rollout node.
        columns: columns of metrics.jsonl that become figures, from the first and the last step that have them.
        more: returns further figures of the finished job.
    """
    figures: Figures = {}

    def finish(job: Job) -> None:
        job.wait(lambda: False)
        figures.update(accuracy_before(job) | first_and_last(job, columns) | more(job))

    result = train(run, job_group=job_group, nodes=nodes, while_running=finish)
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


def of_last_step(job: Job, columns: Sequence[str]) -> Figures:
    """Return each column's value of the last step."""
    last = job.steps()[-1]
    return {column + AFTER: last[column] for column in columns if last.get(column) is not None}


def before_and_after(results: Results, figure: str) -> tuple[str, str]:
    """Return a figure's means before and after, or of the first and the last step, as cells; "" without values."""
    before, after = (
        spread([run.figures[figure + end] for run in results if figure + end in run.figures]) for end in (BEFORE, AFTER)
    )
    return before, after


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
    """Return a sentence for the summary: each task's accuracies before and after, by whether a seed has learned.

    A seed has learned if the 95% interval of its gain is above 0.
    """
    learned: dict[bool, list[str]] = {}
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        before, after = accuracies(own)
        if before:
            prompts = own[0].prompts
            risen = sum(least_gain(first, last, prompts) > 0 for first, last in zip(before, after, strict=True))
            change = f"{statistics.fmean(before):.2f} to {names(f'{accuracy:.2f}' for accuracy in after)}"
            highest = max(max(run.rewards) for run in own)
            text = f"in {risen} of {len(after)} seeds" if risen else f"highest reward of a step {highest:.2f}"
            learned.setdefault(risen > 0, []).append(f"{task} {change} ({text})")
    if not learned:
        return []
    parts = []
    if True in learned:
        parts.append(f"**Learned:** {'; '.join(learned[True])}")
    if False in learned:
        parts.append(f"**Not learned:** {'; '.join(learned[False])}")
    return [f"{link}, accuracy on held-out prompts before training and after, by seed. {'. '.join(parts)}."]


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
