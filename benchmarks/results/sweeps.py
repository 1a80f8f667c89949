"""Sweeps of the learning rate and a second hyperparameter, whose choice is judged on seeds of its own."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.results import in_process
from benchmarks.results.comparisons import (
    ACCURACY,
    REWARD,
    Measure,
    accuracy_note,
    anchor,
    comparison,
    names,
    paragraph,
    spread,
    table,
)
from benchmarks.results.plots import HeatMap, heat_maps
from benchmarks.results.runs import Part, Results, Run, Settings, by_variant
from benchmarks.results.tasks import DEMO_TASK, TINY, seeded

SWEEP, REPORT, BASE = "sweep", "report", "defaults"
COLLAPSED = 0.5
"""An accuracy below which a run of the sweep counts as one that has collapsed or has not learned."""


@dataclass(frozen=True)
class Sweep:
    """A grid of learning rates and values of other hyperparameters, one of which differs from the task's at a time."""

    task: Settings
    rates: Sequence[str]
    panels: Mapping[str, Mapping[str, Settings]]
    """The values of each hyperparameter, with their settings in addition to the task's."""
    choosing: Sequence[int]
    """Seeds of the grid."""
    follow_up: str
    """A learning rate to be compared with the task's own."""
    reporting: Sequence[int]
    """Seeds of this comparison, which are none of the grid's."""

    def cell(self, rate: str, panel: str, value: str) -> str:
        """Return the variant of a cell; a cell with the task's own settings is the same in all panels."""
        return f"{rate}, {panel} {value}" if self.panels[panel][value] else rate

    def runs(self) -> list[Run]:
        """Return the runs of the follow-up and of the grid, each seed by seed."""
        cells = {
            self.cell(rate, panel, value): settings | {"LEARNING_RATE": rate}
            for rate in self.rates
            for panel, values in self.panels.items()
            for value, settings in values.items()
        }
        follow_up = {BASE: {}, f"learning rate {self.follow_up}": {"LEARNING_RATE": self.follow_up}}
        found = [(REPORT, seed, name, settings) for seed in self.reporting for name, settings in follow_up.items()]
        found += [(SWEEP, seed, name, settings) for seed in self.choosing for name, settings in cells.items()]
        return [
            Run(task, name, seed, seeded(self.task | settings, seed), in_process.train)
            for task, seed, name, settings in found
        ]

    def grid(self, results: Results, measure: Measure = ACCURACY) -> dict[str, list[float]]:
        """Return a measure of each cell that has been run, one number a seed."""
        found: dict[str, list[float]] = {}
        for result in results:
            value = measure.of(result)
            if result.task == SWEEP and value is not None:
                found.setdefault(result.variant, []).append(value)
        return found

    def best(self, numbers: Mapping[str, float], panel: str, value: str) -> str:
        """Return the learning rate with the highest number for a value of a hyperparameter."""
        return max(self.rates, key=lambda rate: numbers.get(self.cell(rate, panel, value), -math.inf))

    def maps(self, accuracy: Mapping[str, float]) -> list[HeatMap]:
        """Return a heat map for each hyperparameter: learning rates by values."""
        return [
            HeatMap(
                panel,
                self.rates,
                tuple(values),
                [[accuracy.get(self.cell(rate, panel, value), math.nan) for value in values] for rate in self.rates],
            )
            for panel, values in self.panels.items()
        ]

    def pairs(self) -> list[tuple[str, str]]:
        """Return each hyperparameter with each of its values."""
        return [(panel, value) for panel, values in self.panels.items() for value in values]

    def best_rates(self, results: Results) -> str:
        """Return a table of each value's best learning rates, by accuracy and by mean reward."""
        grid, own = self.grid(results), self.task["LEARNING_RATE"]
        accuracy, reward = means(grid), means(self.grid(results, REWARD))
        rows = []
        for panel, value in self.combinations():
            rate = self.best(accuracy, panel, value)
            cells = [grid.get(self.cell(r, panel, value), []) for r in (rate, own)]
            name = f"{panel} {value}" if self.panels[panel][value] else "the task's own"
            rows.append((name, rate, *map(spread, cells), self.best(reward, panel, value)))
        columns = ("best rate by accuracy", "accuracy there", f"accuracy at {own}", "best rate by mean reward")
        return table(("", *columns), rows)

    def combinations(self) -> list[tuple[str, str]]:
        """Return each hyperparameter with its values; the task's own settings, which several have, once."""
        found = {self.cell("", panel, value): (panel, value) for panel, value in self.pairs()}
        return list(found.values())

    def won(self, numbers: Mapping[str, float]) -> Counter[str]:
        """Return for how many combinations of the other hyperparameters each learning rate is the best."""
        return Counter(self.best(numbers, *pair) for pair in self.combinations())

    def conclusion(self, results: Results) -> str:
        """Return what the grid says about the learning rate, and how little with its seeds and at its edge."""
        grid, reward = self.grid(results), means(self.grid(results, REWARD))
        won = self.won(means(grid))
        text = (
            f"of {won.total()} combinations of the other hyperparameters, the highest accuracy is at "
            f"{self._counts(won)}, the highest mean reward at {self._counts(self.won(reward))} (the task's own rate is "
            f"{self.task['LEARNING_RATE']})"
        )
        edges = [rate for rate in (self.rates[0], self.rates[-1]) if rate in won]
        if edges:
            text += f"; {names(edges)} is at the edge of the grid, so the best rate may lie beyond it"
        counts = [len(values) for values in grid.values()]
        fewest = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        seeds = f"{fewest} seed{'s' if max(counts) > 1 else ''}"
        return (
            f"{text}. A cell has {seeds}, and differences of cells are not tested: this shows where to look, and not "
            "which setting is best."
        )

    def _counts(self, won: Counter[str]) -> str:
        return names(f"{rate} in {won[rate]}" for rate in self.rates if rate in won)

    def collapses(self, results: Results) -> str:
        """Return in how many runs of each learning rate the accuracy is below COLLAPSED; "" if in none."""
        counts: dict[str, str] = {}
        for rate in self.rates:
            cells = {self.cell(rate, *pair) for pair in self.combinations()}
            values = [value for cell, values in self.grid(results).items() if cell in cells for value in values]
            if low := sum(value < COLLAPSED for value in values):
                counts[rate] = f"{low} of {len(values)} at {rate}"
        return f"Runs that end with an accuracy below {COLLAPSED:g}: {names(counts.values())}." if counts else ""

    def chosen(self, grid: Mapping[str, Sequence[float]]) -> str:
        """Return the learning rate that is best for the most combinations of the grid, the lower one of equals."""
        won = self.won(means(grid))
        return max(self.rates, key=lambda rate: won[rate])


def means(grid: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean accuracy of each cell."""
    return {cell: statistics.fmean(values) for cell, values in grid.items()}


def sweep_part(name: str, title: str, text: str, sweep: Sweep) -> Part:
    """Return the part of a sweep; ``text`` says which task it is of."""
    general = """
    At each learning rate one other hyperparameter is changed at a time. Every cell generates as many completions, and
    its number is the mean accuracy on held-out prompts, sampled at temperature 1 whatever the temperature of
    training. The clip is varied with four updates a batch, since it is never reached with one.
    """

    def show(results: Results) -> str:
        grid, report = sweep.grid(results), [result for result in results if result.task == REPORT]
        parts = [paragraph(text + general)]
        if grid:
            parts.append(heat_maps(name, "accuracy by learning rate (rows)", sweep.maps(means(grid))))
            parts.append(sweep.best_rates(results))
            conclusion = sweep.conclusion(results)
            parts.append(paragraph(f"{conclusion[0].upper()}{conclusion[1:]} {sweep.collapses(results)}"))
        if report:
            choice = "is" if grid and sweep.chosen(grid) == sweep.follow_up else "is not"
            follow_up = f"""
            Beside the task's own settings, on seeds that are not the grid's: a learning rate of {sweep.follow_up},
            which {choice} the rate that is best for the most combinations of the grid.
            """
            parts.append(paragraph(follow_up))
            parts += [comparison(report, REPORT, BASE), accuracy_note(report)]
        return "\n\n".join(parts)

    def summary(results: Results) -> list[str]:
        sentences = []
        if sweep.grid(results):
            sentences.append(f"[{title}](#{anchor(title)}): {sweep.conclusion(results)}")
        base, other = (
            [run.accuracy for run in by_variant(results, REPORT).get(variant, []) if run.accuracy is not None]
            for variant in (BASE, f"learning rate {sweep.follow_up}")
        )
        if base and other:
            rates = f"with a learning rate of {sweep.follow_up} instead of {sweep.task['LEARNING_RATE']}"
            sentences.append(
                f"{title}, other seeds: {rates}, the accuracy is {spread(other)} instead of {spread(base)}."
            )
        return sentences

    return Part(name, title, sweep.runs(), show, summary)


PANELS: dict[str, dict[str, Settings]] = {
    "group size": {
        "4": {"GROUP_SIZE": "4", "BATCH_SIZE": "16"},
        "8": {},
        "16": {"GROUP_SIZE": "16", "BATCH_SIZE": "4"},
    },
    "temperature": {"0.7": {"TEMPERATURE": "0.7"}, "1": {}, "1.3": {"TEMPERATURE": "1.3"}},
    "clip": {clip: {"UPDATES_PER_BATCH": "4", "CLIP_LOW": clip, "CLIP_HIGH": clip} for clip in ("0.1", "0.2", "0.4")},
}

TINY_SWEEP = Sweep(
    task=TINY,
    rates=("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3"),
    panels=PANELS,
    choosing=range(100, 103),
    follow_up="2e-3",
    reporting=range(5),
)
TINY_PART = sweep_part(
    "hyperparameters", "Hyperparameters of the tiny task", "The tiny task of the parts above, 40 steps.", TINY_SWEEP
)


DEMO_SWEEP = Sweep(
    task=DEMO_TASK,
    rates=("5e-6", "1e-5", "2e-5", "4e-5"),
    panels=PANELS,
    choosing=range(100, 103),
    follow_up="1e-5",
    reporting=range(3),
)
DEMO_PART = sweep_part(
    "hyperparameters_demo",
    "Hyperparameters of the demo",
    "The demo's task, 10 steps; the held-out prompts are 20, so that differences of single runs below 0.2 say little.",
    DEMO_SWEEP,
)
