"""A training run of a whole job group under the local runner, with all of its processes on this machine."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import ROOT
from benchmarks.job import JOB_GROUP, Job, Steps, running
from benchmarks.results.runs import Result, Run, result_of
from benchmarks.results.tasks import with_model


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
        nodes: numbers of nodes beside one trainer node and one rollout node.
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
