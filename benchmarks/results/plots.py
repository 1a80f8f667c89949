"""Plots of results as SVG, the same bytes for the same data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.results.runs import KEPT, Results, by_variant, commonest_processor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves(results: Results, name: str, task: str, title: str, timed: str = "") -> str:
    """Draw a task's rewards by step and by generated tokens to KEPT/NAME.svg, and return a Markdown image of it.

    A line is the mean over a variant's seeds, its band reaches from the least to the most. Seeds that have fewer
    steps than others, which are runs that ended early, shorten the line. With ``timed``, a third plot is by the clock:
    the median over the variant's runs on the processor that made most of the task's runs. Runs of a single step are
    left out; without others there is no image.
    """
    results = [result for result in results if result.task == task and len(result.rewards) > 1]
    if not results:
        return ""
    variants, processor = by_variant(results, task), commonest_processor(results)
    figure = _figure(name, (15 if timed else 12, 4))
    panels = figure.subplots(1, 3 if timed else 2, sharey=True)
    for number, (variant, runs) in enumerate(variants.items()):
        count = min(len(result.rewards) for result in runs)
        rewards = np.array([result.rewards[:count] for result in runs])
        clocked = [np.cumsum(result.seconds[:count]) for result in runs if result.processor == processor]
        places = [
            np.arange(1, count + 1),
            np.mean([np.cumsum(result.tokens[:count]) for result in runs], axis=0),
            *([np.median(clocked, axis=0)] if timed and clocked else []),
        ]
        # There are ten colours: lines from the eleventh on are dashed.
        colour, style = f"C{number % 10}", "-" if number < 10 else "--"
        for axes, run_places in zip(panels, places, strict=False):
            axes.plot(run_places, rewards.mean(axis=0), style, linewidth=1.2, color=colour, label=variant)
            axes.fill_between(run_places, rewards.min(0), rewards.max(0), alpha=0.1, color=colour, linewidth=0)
    panels[0].set(xlabel="step", ylabel="mean reward of completions", title=title)
    panels[1].set(xlabel="generated tokens")
    if timed:
        panels[2].set(xlabel="seconds of steps")
        panels[2].set_title(processor, fontsize="small")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return _saved(figure, name, title)


def by_clock(results: Results, name: str, task: str, title: str) -> str:
    """Draw a task's rewards by the seconds of its steps to KEPT/NAME.svg, a line a seed; return a Markdown image of it.

    Only runs on the processor that made most of the task's runs count.
    """
    results = [result for result in results if result.task == task and result.processor == commonest_processor(results)]
    if not results:
        return ""
    figure = _figure(name, (8, 3.6))
    axes = figure.subplots()
    for number, (variant, runs) in enumerate(by_variant(results, task).items()):
        for place, run in enumerate(runs):
            label = variant if place == 0 else "_"  # no line of its own in the legend
            axes.plot(np.cumsum(run.seconds), run.rewards, linewidth=1.2, color=f"C{number}", alpha=0.8, label=label)
    axes.set(xlabel="seconds of steps", ylabel="mean reward", title=title, xlim=(0, None), ylim=(0, 1))
    axes.legend(loc="lower right", fontsize="small")
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
    path.write_text("\n".join(line.rstrip() for line in path.read_text("utf-8").splitlines()) + "\n")
    return f"![{title}]({Path('results') / path.name})"
