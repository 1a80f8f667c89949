"""Plots of results as SVG, the same bytes for the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.results.runs import KEPT, Results, by_variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves(name: str, results: Results, task: str, title: str) -> str:
    """Draw a task's rewards by step and by generated tokens to KEPT/NAME.svg, and return a Markdown image of it.

    A line is the mean over a variant's seeds, its band reaches from the least to the most. Seeds that have fewer
    steps than others, which are runs that ended early, shorten the line.
    """
    figure = _figure(name, (10, 4))
    by_step, by_token = figure.subplots(1, 2, sharey=True)
    variants = by_variant(results, task)
    for own in variants.values():
        count = min(len(result.rewards) for result in own)
        rewards = np.array([result.rewards[:count] for result in own])
        tokens = np.mean([np.cumsum(result.tokens[:count]) for result in own], axis=0)
        for axes, places in ((by_step, np.arange(1, count + 1)), (by_token, tokens)):
            [line] = axes.plot(places, rewards.mean(axis=0), linewidth=1.2)
            axes.fill_between(places, rewards.min(0), rewards.max(0), alpha=0.1, color=line.get_color(), linewidth=0)
    by_step.set(xlabel="step", ylabel="mean reward of completions", title=title)
    by_token.set(xlabel="generated tokens")
    by_token.legend(by_token.get_lines(), list(variants), fontsize="small")
    return _saved(figure, name, title)


@dataclass(frozen=True)
class HeatMap:
    """Numbers [rows, columns] with the labels of both; NaN is left empty."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]


def heat_maps(name: str, title: str, maps: Sequence[HeatMap]) -> str:
    """Draw heat maps side by side, in the same colours, to KEPT/NAME.svg, and return a Markdown image of them."""
    figure = _figure(name, (1 + 2.3 * len(maps), 1.2 + 0.4 * len(maps[0].rows)))
    everything = np.concatenate([np.ravel(np.array(one.values, dtype=float)) for one in maps])
    low, high = np.nanmin(everything), np.nanmax(everything)
    for axes, one in zip(np.atleast_1d(figure.subplots(1, len(maps), sharey=True)), maps, strict=True):
        axes.imshow(np.array(one.values, dtype=float), aspect="auto", vmin=low, vmax=high)
        axes.set(title=one.title)
        axes.set_xticks(range(len(one.columns)), one.columns)
        axes.set_yticks(range(len(one.rows)), one.rows)
        for (row, column), value in np.ndenumerate(np.array(one.values, dtype=float)):
            if not np.isnan(value):
                colour = "white" if value < (low + high) / 2 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small", color=colour)
    figure.suptitle(title)
    return _saved(figure, name, title)


def _figure(name: str, size: tuple[float, float]) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none"}
    return Figure(figsize=size, layout="constrained")


def _saved(figure: Figure, name: str, title: str) -> str:
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    # matplotlib leaves spaces at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return f"![{title}]({Path('results') / path.name})"
