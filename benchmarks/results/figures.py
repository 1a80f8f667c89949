"""Print tables and draw pictures of the rows in docs/results/.

    python -m benchmarks.results.figures NAME [--base VARIANT] [--draw] [...]

NAME is that of an experiment, or a file of rows. A table has the variants of a task: the mean reward over all steps and
the accuracy, each as the mean over seeds with the least and the most in brackets, and the mean difference from the base
with its 95% confidence interval by seed (Student's t). Runs of one seed on one processor are a pair. "identical" stands
for pairs whose rewards at every step, and accuracies, are equal to the last digit.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.job import ROOT
from services.core.files import read_records

KEPT = ROOT / "docs/results"
CONFIDENCE = 0.95
FEWEST_PAIRS = 3
"""Fewest pairs of runs that a difference is given for."""
WINDOW = 3
"""A reward is reached when the mean of this many steps is at least the reward."""

Row = dict[str, Any]
Measure = Callable[[Row], float | None]


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to about four digits.

    With t = sqrt(degrees) tan(a), the density is proportional to cos(a)^(degrees - 1) on -pi/2 < a < pi/2, a finite
    interval over which it is summed.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    middles = (angles[1:] + angles[:-1]) / 2
    below = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (degrees - 1))])
    return math.sqrt(degrees) * math.tan(float(np.interp(probability, below / below[-1], angles)))


def pairs(rows: Iterable[Row], base: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Return the runs of two variants with the same seed on the same processor."""
    others = {(row["seed"], row["processor"]): row for row in base}
    return [(row, others[key]) for row in rows if (key := (row["seed"], row["processor"])) in others]


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of differences by seed, and the ends of its confidence interval."""
    count = len(differences)
    half = t_quantile((1 + CONFIDENCE) / 2, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    mean = statistics.fmean(differences)
    return mean, mean - half, mean + half


def difference(rows: Sequence[Row], base: Sequence[Row], measure: Measure) -> str:
    """Return the mean difference of two variants with its interval; "" with fewer than FEWEST_PAIRS pairs."""
    both = pairs(rows, base)
    numbers = [(measure(one), measure(other)) for one, other in both]
    differences = [a - b for a, b in numbers if a is not None and b is not None]
    if len(differences) < FEWEST_PAIRS:
        return ""
    if all((one["rewards"], one["accuracy"]) == (other["rewards"], other["accuracy"]) for one, other in both):
        return "identical"
    mean, low, high = interval(differences)
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})".replace("-0.000", "+0.000")


def mean_reward(row: Row) -> float | None:
    """Return the mean reward over a run's steps."""
    return statistics.fmean(row["rewards"]) if row["rewards"] else None


def reached(row: Row, reward: float) -> int | None:
    """Return after how many steps the mean of the last WINDOW was at least ``reward``; None if it never was."""
    ends = range(WINDOW, len(row["rewards"]) + 1)
    return next((end for end in ends if statistics.fmean(row["rewards"][end - WINDOW : end]) >= reward), None)


def spread(values: Iterable[float | None], digits: int, middle: Callable[..., float] = statistics.fmean) -> str:
    """Return the mean, the least and the most of the values that are not None as text; "" without any."""
    present = [value for value in values if value is not None]
    if not present:
        return ""
    text = f"{middle(present):.{digits}f}"
    return f"{text} ({min(present):.{digits}f} to {max(present):.{digits}f})" if len(present) > 1 else text


def by_name(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    """Return rows by their task or variant, in their first order."""
    named: dict[str, list[Row]] = {}
    for row in rows:
        named.setdefault(row[key], []).append(row)
    return named


def table(rows: Mapping[str, Sequence[Row]], base: str | None, args: argparse.Namespace) -> str:
    """Return a Markdown table of rows by name, without the columns that are empty; ``base`` is compared with."""
    # Seconds of different processors cannot be compared.
    [(processor, _)] = Counter(row["processor"] for runs in rows.values() for row in runs).most_common(1)
    lines: list[dict[str, object]] = []
    for name, runs in rows.items():
        line: dict[str, object] = {"": name, "seeds": len(runs)}
        for measure, of, digits in (("reward", mean_reward, 3), ("accuracy", itemgetter("accuracy"), 2)):
            line[measure] = spread(map(of, runs), digits)
            line[f"{measure} minus {base}'s"] = difference(runs, rows[base], of) if base not in (None, name) else ""
        if base is None:
            line["first step"] = spread((row["rewards"][0] for row in runs), 2)
            line["last three"] = spread((statistics.fmean(row["rewards"][-WINDOW:]) for row in runs), 2)
            line["n"] = runs[0]["prompts"] or ""
        if args.reached:
            steps = [reached(row, args.reached) for row in runs]
            line[f"reached {args.reached:g}"] = f"{len(runs) - steps.count(None)} of {len(runs)}"
            line["steps, median"] = spread(steps, 0, statistics.median)
            seconds = [sum(row["seconds"][:count]) for row, count in zip(runs, steps, strict=True) if count]
            line["seconds, median"] = spread(seconds, 0, statistics.median)
        line |= {column: spread((row["figures"].get(column) for row in runs), 2) for column in args.columns}
        line["tokens"] = f"{statistics.fmean(sum(row['tokens']) for row in runs):,.0f}"
        timed = [row["processor_seconds"] for row in runs if row["processor"] == processor]
        line["CPU s"] = f"{statistics.fmean(timed):.0f}" if timed else ""
        lines.append(line)
    columns = [column for column in lines[0] if not column or any(line[column] for line in lines)]
    head: list[list[object]] = [[*columns], ["---", *("---:" for _ in columns[1:])]]
    cells = [*head, *([line[column] for column in columns] for line in lines)]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in cells)


def draw_curves(rows: Sequence[Row], task: str, name: str) -> Path:
    """Draw a task's rewards by step and by generated tokens.

    A line is the mean over a variant's seeds until its shortest run ends, in a band from the least to the most.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # The same bytes for the same rows.
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none"}
    figure = Figure(figsize=(12, 4), layout="constrained")
    by_step, by_tokens = figure.subplots(1, 2, sharey=True)
    for number, (variant, runs) in enumerate(by_name(rows, "variant").items()):
        count = min(len(row["rewards"]) for row in runs)
        rewards = np.array([row["rewards"][:count] for row in runs])
        tokens = np.mean([np.cumsum(row["tokens"][:count]) for row in runs], axis=0)
        # There are ten colours: lines from the eleventh on are dashed.
        colour, style = f"C{number % 10}", "-" if number < 10 else "--"
        for axes, places in ((by_step, np.arange(1, count + 1)), (by_tokens, tokens)):
            axes.plot(places, rewards.mean(axis=0), style, linewidth=1.2, color=colour, label=variant)
            axes.fill_between(places, rewards.min(0), rewards.max(0), alpha=0.1, color=colour, linewidth=0)
    by_step.set(xlabel="step", ylabel="mean reward of completions", title=task)
    by_tokens.set(xlabel="generated tokens")
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path = KEPT / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    # matplotlib leaves spaces at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in path.read_text("utf-8").splitlines()) + "\n", "utf-8")
    return path


def main() -> None:
    """Read the command line, print the tables, and draw what is asked for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.results.figures", description=__doc__, formatter_class=form)
    parser.add_argument("name", help="an experiment or a file")
    parser.add_argument("--base", help="the variant that the others are compared with; default: the first")
    parser.add_argument("--task", default="", help="the tasks that contain this text")
    parser.add_argument("--columns", nargs="+", default=[], help="further columns: names of a row's figures")
    parser.add_argument("--reached", type=float, help="a mean reward; adds the steps and seconds until it")
    parser.add_argument("--draw", action="store_true", help="write docs/results/NAME-TASK.svg: rewards by step")
    args = parser.parse_args()
    file = Path(args.name) if args.name.endswith(".jsonl") else KEPT / f"{args.name}.jsonl"
    tasks = by_name((row for row in read_records(file) if args.task in row["task"]), "task")
    if all(len(by_name(rows, "variant")) == 1 for rows in tasks.values()):
        print(table(tasks, None, args))
    else:
        for task, rows in tasks.items():
            variants = by_name(rows, "variant")
            base = args.base if args.base in variants else next(iter(variants))
            print(f"{task}\n\n{table(variants, base, args)}\n")
    for task, rows in tasks.items():
        if args.draw:
            name = re.sub(r"\W+", "-", task.lower()).strip("-")
            print(draw_curves([row for row in rows if len(row["rewards"]) > 1], task, f"{file.stem}-{name}"))


if __name__ == "__main__":
    main()
