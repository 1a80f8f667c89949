"""Parts that sweep the learning rate and a second hyperparameter, and judge the choice on seeds of its own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.results import in_process
from benchmarks.results.plots import HeatMap, heat_maps
from benchmarks.results.runs import Part, Results, Run, Settings
from benchmarks.results.tables import accuracy_note, comparison, paragraph, ranking, table
from benchmarks.results.tasks import seeded

SWEEP, REPORT, BASE = "sweep", "report", "defaults"


@dataclass(frozen=True)
class Sweep:
    """A grid of learning rates and values of other hyperparameters, one of which differs from the task's at a time."""

    task: Settings
    rates: Sequence[str]
    panels: Mapping[str, Mapping[str, Settings]]
    """The values of each hyperparameter, with their settings beside the task's."""
    choosing: Sequence[int]
    """Seeds of the grid."""
    choices: Mapping[str, Settings]
    """Settings that the grid suggests, judged beside those of the task."""
    reporting: Sequence[int]
    """Seeds of these runs, which are none of the grid's."""

    def cell(self, rate: str, panel: str, value: str) -> str:
        """Return the variant of a cell; a cell with the task's own settings is the same in all panels."""
        return f"{rate}, {panel} {value}" if self.panels[panel][value] else rate

    def runs(self) -> list[Run]:
        """Return the runs of the grid and of the choices, each seed by seed."""
        cells = {
            self.cell(rate, panel, value): settings | {"LEARNING_RATE": rate}
            for rate in self.rates
            for panel, values in self.panels.items()
            for value, settings in values.items()
        }
        choices = {BASE: {}, **self.choices}
        found = [(SWEEP, seed, name, settings) for seed in self.choosing for name, settings in cells.items()]
        found += [(REPORT, seed, name, settings) for seed in self.reporting for name, settings in choices.items()]
        return [
            Run(task, name, seed, seeded(self.task | settings, seed), in_process.train)
            for task, seed, name, settings in found
        ]

    def accuracies(self, results: Results) -> dict[str, float]:
        """Return the median accuracy over the choosing seeds of each cell that has been run."""
        found: dict[str, list[float]] = {}
        for result in results:
            if result.task == SWEEP and result.accuracy is not None:
                found.setdefault(result.variant, []).append(result.accuracy)
        return {name: statistics.median(values) for name, values in found.items()}

    def best(self, accuracy: Mapping[str, float], panel: str, value: str) -> str:
        """Return the learning rate with the highest accuracy for a value of a hyperparameter."""
        return max(self.rates, key=lambda rate: accuracy.get(self.cell(rate, panel, value), -math.inf))

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

    def best_rates(self, accuracy: Mapping[str, float]) -> str:
        """Return a table of each value's best learning rate, with the accuracy there and at the task's own rate."""
        own = self.task["LEARNING_RATE"]
        rows = []
        for panel, values in self.panels.items():
            for value in values:
                rate = self.best(accuracy, panel, value)
                numbers = [accuracy.get(self.cell(r, panel, value), math.nan) for r in (rate, own)]
                rows.append((f"{panel} {value}", rate, *(f"{number:.2f}" for number in numbers)))
        return table(("", "best learning rate", "accuracy there", f"accuracy at {own}"), rows)


def sweep_part(name: str, title: str, text: str, sweep: Sweep) -> Part:
    """Return the part of a sweep; ``text`` says which task it is of."""
    general = """
    At each learning rate one other hyperparameter is changed at a time. Every cell generates as many completions, and
    its number is the median accuracy on held-out prompts, sampled at temperature 1 whatever the temperature of
    training. The clip is varied with four updates a batch, since it is never reached with one.
    """

    def show(results: Results) -> str:
        accuracy = sweep.accuracies(results)
        report = [result for result in results if result.task == REPORT]
        parts = [paragraph(text + general)]
        if accuracy:
            parts.append(heat_maps(name, "accuracy by learning rate (rows)", sweep.maps(accuracy)))
            parts.append(sweep.best_rates(accuracy))
        if report:
            parts.append("The grid's seeds are not used again; these runs have seeds of their own:")
            parts += [comparison(report, REPORT, BASE), accuracy_note(report)]
        return "\n\n".join(parts)

    def summary(results: Results) -> list[str]:
        accuracy, order = sweep.accuracies(results), ranking(results, REPORT, BASE)
        sentences = []
        if accuracy:
            highest = max(accuracy, key=lambda cell: accuracy[cell])
            pairs = [(panel, value) for panel, values in sweep.panels.items() for value in values]
            rates = sorted({sweep.best(accuracy, *pair) for pair in pairs}, key=float)
            anchor = title.lower().replace("'", "").replace(" ", "-")
            sentences.append(
                f"[{title}](#{anchor}): the highest accuracy is that of {highest} ({accuracy[highest]:.2f}); the best "
                f"learning rate for each other value is {' or '.join(rates)}."
            )
        if order:
            sentences.append(f"On seeds that chose nothing, beside the task's own settings by mean reward: {order}.")
        return sentences

    return Part(name, title, sweep.runs(), show, summary)
