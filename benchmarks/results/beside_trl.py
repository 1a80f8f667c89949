"""The comparison with TRL's GRPOTrainer: the same model, prompts in the same order, rewards and hyperparameters."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import psutil

from benchmarks import trl_runs
from benchmarks.harness import ROOT
from benchmarks.results.comparisons import REWARD, compare, table
from benchmarks.results.runs import Result, Results, Run, by_variant, result_of
from benchmarks.results.tasks import with_model

OURS, TRL = "this project", "TRL"
STAGE = 10
"""Steps whose mean rewards are compared, too."""
INTERPRETERS = (".venv-trl/bin/python", ".venv-oracles/bin/python")


def train_trl(run: Run) -> Result:
    """Train by TRL with the run's settings as far as TRL has them.

    Raises:
        SystemExit: there is no interpreter with TRL, or the run failed.
    """
    python = next((ROOT / path for path in INTERPRETERS if (ROOT / path).exists()), None)
    if python is None:
        raise SystemExit(f"error: no interpreter with TRL at {' or '.join(INTERPRETERS)}; `make results` installs one")
    result = result_of(run)
    with with_model(run.settings) as settings:
        started = _processor_seconds()
        steps = trl_runs.train(settings, str(python), threads=1)
        result.processor_seconds = _processor_seconds() - started
    for step in steps:
        result.rewards.append(step["reward"])
        result.tokens.append(round(step["tokens"]))
        result.seconds.append(step["seconds"])
    return result


def _processor_seconds() -> float:
    """Return the processor time of this process and of the ended processes that it has started."""
    times = psutil.Process().cpu_times()
    return time.process_time() + float(times.children_user + times.children_system)


def seconds_to(results: Results, task: str, variant: str, reward: str) -> str:
    """Return the seconds of steps until the mean of three steps is at least ``reward``: the median, least and most."""
    times = []
    for run in by_variant(results, task).get(variant, []):
        reached = (
            last
            for last in range(3, len(run.rewards) + 1)
            if statistics.fmean(run.rewards[last - 3 : last]) >= float(reward)
        )
        if (last := next(reached, None)) is not None:
            times.append(sum(run.seconds[:last]))
    return f"{statistics.median(times):.0f} s ({min(times):.0f} to {max(times):.0f})" if times else ""


def stages(results: Results, task: str) -> str:
    """Return a table of the differences of this project's mean reward from TRL's, by stages of a run."""
    variants = by_variant(results, task)
    ours, trls = variants.get(OURS, []), variants.get(TRL, [])
    if not ours or not trls:
        return ""
    rows = []
    for first in range(0, len(ours[0].rewards), STAGE):

        def mean(result: Result, first: int = first) -> float:
            return statistics.fmean(result.rewards[first : first + STAGE])

        means = (f"{statistics.fmean(map(mean, side)):.3f}" for side in (ours, trls))
        compared = compare(ours, trls, replace(REWARD, of=mean))
        cells = (str(compared), str(compared.verdict)) if compared else ("", "")
        rows.append((f"{first + 1} to {first + STAGE}", *means, *cells))
    return table(("steps", OURS, TRL, f"difference from {TRL}", "verdict"), rows)
