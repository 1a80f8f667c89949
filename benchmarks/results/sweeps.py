"""Parts that sweep the learning rate and a second hyperparameter, and judge the choice on seeds of its own."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.results import in_process
from benchmarks.results.plots import HeatMap, heat_maps
from benchmarks.results.runs import Part, Results, Run, Settings
from benchmarks.results.tables import accuracy_note, anchor, comparison, names, paragraph, ranking, table
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
    follow_up: str
    """A learning rate to be compared with the task's own."""
    reporting: Sequence[int]
    """Seeds of this comparison, which are none of the grid's."""

    def cell(self, rate: str, panel: str, value: str) -> str:
        """Return the variant of a cell; a cell with the task's own settings is the same in all panels."""
        return f"{rate}, {panel} {value}" if self.panels[panel][value] else rate

    def runs(self) -> list[Run]:
        """Return the runs of the grid and of the follow-up, each seed by seed."""
        cells = {
            self.cell(rate, panel, value): settings | {"LEARNING_RATE": rate}
            for rate in self.rates
            for panel, values in self.panels.items()
            for value, settings in values.items()
        }
        follow_up = {BASE: {}, f"learning rate {self.follow_up}": {"LEARNING_RATE": self.follow_up}}
        found = [(SWEEP, seed, name, settings) for seed in self.choosing for name, settings in cells.items()]
        found += [(REPORT, seed, name, settings) for seed in self.reporting for name, settings in follow_up.items()]
        return [
            Run(task, name, seed, seeded(self.task | settings, seed), in_process.train)
            for task, seed, name, settings in found
        ]

    def grid(self, results: Results) -> dict[str, list[float]]:
        """Return the accuracies of each cell that has been run, one a seed."""
        found: dict[str, list[float]] = {}
        for result in results:
            if result.task == SWEEP and result.accuracy is not None:
                found.setdefault(result.variant, []).append(result.accuracy)
        return found

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

    def pairs(self) -> list[tuple[str, str]]:
        """Return each hyperparameter with each of its values."""
        return [(panel, value) for panel, values in self.panels.items() for value in values]

    def best_rates(self, accuracy: Mapping[str, float]) -> str:
        """Return a table of each value's best learning rate, with the accuracy there and at the task's own rate."""
        own = self.task["LEARNING_RATE"]
        rows = []
        for panel, value in self.pairs():
            rate = self.best(accuracy, panel, value)
            numbers = [accuracy.get(self.cell(r, panel, value), math.nan) for r in (rate, own)]
            rows.append((f"{panel} {value}", rate, *(f"{number:.2f}" for number in numbers)))
        return table(("", "best learning rate", "accuracy there", f"accuracy at {own}"), rows)

    def won(self, accuracy: Mapping[str, float]) -> Counter[str]:
        """Return for how many combinations of the other hyperparameters each learning rate is the best."""
        # The task's own settings are a value in several panels.
        combinations = {self.cell("", *pair): pair for pair in self.pairs()}
        return Counter(self.best(accuracy, *pair) for pair in combinations.values())

    def conclusion(self, grid: Mapping[str, Sequence[float]]) -> str:
        """Return what the grid says about the learning rate, and how little with its seeds and at its edge."""
        won = self.won(means(grid))
        counted = names(f"{rate} in {won[rate]}" for rate in self.rates if rate in won)
        text = f"of {won.total()} combinations of the other hyperparameters, the highest accuracy is at {counted}"
        edges = [rate for rate in (self.rates[0], self.rates[-1]) if rate in won]
        if edges:
            text += f"; {names(edges)} is at the edge of the grid, so the best rate may lie beyond it"
        counts = [len(values) for values in grid.values()]
        fewest = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        seeds = f"{fewest} seed{'s' if max(counts) > 1 else ''}"
        return (
            f"{text}. A cell is the mean of {seeds}, and differences of cells are not tested, so this shows where to "
            "look and not which setting is best."
        )

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
            accuracy = means(grid)
            parts.append(heat_maps(name, "accuracy by learning rate (rows)", sweep.maps(accuracy)))
            parts.append(sweep.best_rates(accuracy))
            conclusion = sweep.conclusion(grid)
            parts.append(paragraph(conclusion[0].upper() + conclusion[1:]))
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
        grid, order = sweep.grid(results), ranking(results, REPORT, BASE)
        sentences = []
        if grid:
            sentences.append(f"[{title}](#{anchor(title)}): {sweep.conclusion(grid)}")
        if order:
            sentences.append(f"{title}, on other seeds beside the task's own settings: {order}")
        return sentences

    return Part(name, title, sweep.runs(), show, summary)
