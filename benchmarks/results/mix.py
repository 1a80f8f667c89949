"""Runs of several sources at once, compared with a run of each source alone that has the same prompts of it.

A step of a run of one source has as many groups as the source has in a step of the mix, so the runs of all sources
together generate the tokens of the mix, but for the lengths of their answers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import yaml

from benchmarks.harness import ROOT
from benchmarks.job import JOB_GROUP, Job
from benchmarks.results import job_runs
from benchmarks.results.comparisons import NEEDS_SEEDS, REWARD, Measure, compare, spread, table
from benchmarks.results.job_runs import AFTER, BEFORE, Figures
from benchmarks.results.runs import Result, Results, Run, Settings, Train, by_variant
from local_runner.spec import env_file
from services.run_page.progress import of_sources

TASK = MIX = "mix"
MIX_SETTINGS = env_file(ROOT / "examples/demo-mix.env") | {"MAX_STEPS": "12"}
ENTRIES = {entry["name"]: entry for entry in yaml.safe_load((ROOT / MIX_SETTINGS["SOURCES"]).read_text("utf-8"))}
"""The sources of the mix by name, as in the file of SOURCES."""
RATIOS = {source: entry["ratio"] for source, entry in ENTRIES.items()}
MEAN = "mean"
"""The name of the mean over the sources, in which each counts the same."""
REWARD_OF, ACCURACY_OF = "reward/", "accuracy/"
"""Beginnings of a source's figures: the mean reward over all steps, and the greedy accuracy."""


def variants() -> dict[str, tuple[Settings, Train]]:
    """Return the mix, and each source alone with its groups of the mix."""
    groups = int(MIX_SETTINGS["BATCH_SIZE"]) // sum(RATIOS.values())
    return {MIX: ({}, partial(train, sources=tuple(ENTRIES)))} | {
        alone(source): ({"BATCH_SIZE": str(groups * ratio)}, partial(train, sources=(source,)))
        for source, ratio in RATIOS.items()
    }


def alone(source: str) -> str:
    """Return the variant of a source alone."""
    return f"{source} alone"


def train(run: Run, *, sources: Sequence[str]) -> Result:
    """Run a job group on some of the mix's sources, and return the measurements with figures of each source."""
    has_environment = any(ENTRIES[source]["rollout"] == "environment" for source in sources)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "sources.yaml"
        file.write_text(yaml.safe_dump([ENTRIES[source] for source in sources]))
        result = job_runs.train(
            replace(run, settings=run.settings | {"SOURCES": str(file)}),
            job_group=ROOT / "jobgroups/environment.yaml" if has_environment else JOB_GROUP,
            nodes={"environment-server": 1} if has_environment else None,
            more=figures,
        )
    result.settings = dict(run.settings)
    return result


def figures(job: Job) -> Figures:
    """Return each source's mean reward over the steps of a finished job, and its accuracies before and after."""
    found: Figures = {}
    for source in of_sources(job.steps()[0], "reward_mean"):
        found[REWARD_OF + source] = statistics.fmean(step[f"reward_mean/{source}"] for step in job.steps())
    summary = orjson.loads((job.run_dir / "summary.json").read_bytes())
    for source, of_source in summary["sources"].items():
        before, after = of_source["accuracies"]
        found |= {f"{ACCURACY_OF}{source}{BEFORE}": before, f"{ACCURACY_OF}{source}{AFTER}": after}
    return found


def tokens(results: Results) -> str:
    """Return the tokens that a run of the mix generated, and those of the runs of its sources alone together."""
    of_variant = by_variant(results, TASK)
    mix, *separate = (
        statistics.fmean(sum(run.tokens) for run in of_variant[variant]) if variant in of_variant else math.nan
        for variant in variants()
    )
    return f"{mix:,.0f} by the mix and {sum(separate):,.0f} by its sources alone"


def cost(results: Results, name: str) -> str:
    """Return the verdict on a source, or on the MEAN of all, in the mix compared with alone; "" with too few seeds."""
    compared = compare(*_sides(results), _measure(REWARD_OF, name))
    return f"**{compared.verdict}** ({compared.mean:+.3f})" if compared else ""


def costs(results: Results) -> str:
    """Return a table of the sources and their mean: rewards alone and in the mix, the difference, and accuracies."""
    together, separate = _sides(results)
    rows = []
    for name in (*ENTRIES, MEAN):
        reward = _measure(REWARD_OF, name)
        before, after = (_measure(ACCURACY_OF, name, end) for end in (BEFORE, AFTER))
        compared = compare(together, separate, reward)
        rows.append(
            (
                name,
                *(spread(_values(reward, runs), REWARD.digits) for runs in (separate, together)),
                *((str(compared), str(compared.verdict)) if compared else ("", NEEDS_SEEDS)),
                spread(_values(before, together)),
                *(spread(_values(after, runs)) for runs in (separate, together)),
            )
        )
    columns = ("source", "reward alone", "reward in the mix", "difference from alone", "verdict")
    return table((*columns, "accuracy before", "after, alone", "after, in the mix"), rows)


def _sides(results: Results) -> tuple[Results, Results]:
    """Return the runs of the mix, and one result a seed and processor with the figures of all sources alone."""
    merged: dict[tuple[int, str], Result] = {}
    for run in results:
        if run.variant != MIX:
            merged.setdefault((run.seed, run.processor), replace(run, figures={})).figures.update(run.figures)
    return [run for run in results if run.variant == MIX], list(merged.values())


def _measure(start: str, name: str, end: str = "") -> Measure:
    """Return a figure of a source, or the MEAN over all sources, as a measure; a run that lacks a figure has none."""
    names = [f"{start}{source}{end}" for source in (ENTRIES if name == MEAN else (name,))]

    def mean(run: Result) -> float | None:
        return statistics.fmean(run.figures[name] for name in names) if run.figures.keys() >= set(names) else None

    return Measure(name, mean, REWARD.margin, REWARD.digits, mean)


def _values(measure: Measure, runs: Results) -> list[float]:
    return [value for run in runs if (value := measure.of(run)) is not None]
