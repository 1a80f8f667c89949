"""Make the runs of docs/results.md and write the page: ``python -m benchmarks.results [--only PART ...]``.

With ``--again DIRECTORY``, make the runs once more and say whether they agree with those of the page.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.results import comparisons, job_runs
from benchmarks.results.comparisons import ACCURACY, REWARD, Measure, paragraph, spread, t_quantile, table
from benchmarks.results.experiments import PARTS
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, commonest_processor
from services.core import logs

PAGE = ROOT / "docs/results.md"
TEXT = Path(__file__).with_name("page.md")
COMMAND = ".venv/bin/python -m benchmarks.results --only"

FIGURES: Mapping[str, Callable[..., str]] = {
    "accuracy": comparisons.accuracy_note,
    "after": job_runs.after,
    "before": job_runs.before,
    "change": job_runs.change,
    "comparison": comparisons.comparison,
    "curves": curves,
    "difference": comparisons.difference,
    "learned": job_runs.learned,
    "mean": comparisons.mean_figure,
    "processor": commonest_processor,
    "ranking": comparisons.ranking,
    "row": job_runs.task_row,
    "verdict": comparisons.verdict,
}
"""The functions that page.md calls by name in any section: each gets the part's results, and the texts behind it."""

_HEADING = re.compile(r"## (.+) \{(\w+)\}")
_FIGURE = re.compile(r"\{(\w+)(?:: ([^{}]*))?\}")


def page(parts: Sequence[Part] = PARTS) -> str:
    """Return the text of the page, which is page.md with figures, and write its plots."""
    by_name = {part.name: part for part in parts}
    blocks: list[str] = []
    summary: list[str] = []
    for section in re.split(r"(?m)^(?=## )", TEXT.read_text("utf-8")):
        heading, *texts = section.strip().split("\n\n")
        titled = _HEADING.fullmatch(heading)
        if titled is None:
            blocks += [heading, *map(filled, texts)]
            continue
        part = by_name[titled[2]]
        results = part.results()
        blocks.append(f"## {titled[1]}")
        if not results:
            blocks.append(f"Not run here; `{COMMAND} {part.name}` makes the runs.")
            continue
        sentences, *texts = texts
        summary += with_figures(sentences, part, results).splitlines()
        blocks += [provenance(part, results), *(filled(with_figures(text, part, results)) for text in texts)]
    blocks = ["\n".join(summary) if block == "{summary}" else block for block in blocks]
    return "\n\n".join(block for block in blocks if block) + "\n"


def with_figures(text: str, part: Part, results: Results) -> str:
    """Return a block of page.md with its figures, without the lines of a list that lack one."""
    functions = {**FIGURES, **part.figures}

    def figure(found: re.Match[str]) -> str:
        return functions[found[1]](results, *(found[2].split(" | ") if found[2] else ()))

    if not text.startswith("- "):
        return _FIGURE.sub(figure, text)
    lines = text.splitlines()
    complete = [line for line in lines if all(figure(found) for found in _FIGURE.finditer(line))]
    return "\n".join(_FIGURE.sub(figure, line) for line in complete)


def filled(block: str) -> str:
    """Return a block with the line breaks of a paragraph, unless it is a list, a table, an image or a heading."""
    return block if block.startswith(("- ", "|", "![", "#", "{")) else paragraph(block)


def provenance(part: Part, results: Results) -> str:
    """Return a paragraph with command, runs, seeds, steps, and processor time by processor, of a part."""
    seeds = ", ".join(map(str, sorted({result.seed for result in results}))) + _lacking_seeds(results)
    steps = sorted({len(result.rewards) for result in results})
    lengths = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    runs = len(results)
    of = "" if runs == len(part.runs) else f" of {len(part.runs)} (the command makes the others)"
    costs = []
    for processor in sorted({result.processor for result in results}):
        seconds = [result.processor_seconds for result in results if result.processor == processor]
        each = f"{sum(seconds) / 60:.0f} CPU minutes, {statistics.fmean(seconds):.0f} CPU seconds a run"
        costs.append(f"{len(seconds)} on {processor} ({each})")
    return paragraph(
        f"`{COMMAND} {part.name}`: {runs} runs{of}, seeds: {seeds}; {lengths} steps; {' and '.join(costs)}. "
        f"Data: [`{part.name}.jsonl`](results/{part.name}.jsonl)."
    )


def _lacking_seeds(results: Results) -> str:
    """Return a remark in brackets on the variants that lack seeds which others of their task have, or nothing."""
    seeds: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for result in results:
        seeds[result.task][result.variant].add(result.seed)
    numbers = [
        len(of_variant)
        for variants in seeds.values()
        for of_variant in variants.values()
        if len(of_variant) < len(set().union(*variants.values()))
    ]
    return f" (variants with fewer: {len(numbers)}, the least has {min(numbers)})" if numbers else ""


COVERAGE = 0.95
"""The chance that a mean of new seeds lies in the prediction interval."""
COLUMNS = ("part", "task", "variant", "measure", "kept", "again", "verdict")


def report(parts: Sequence[Part], directory: Path) -> str:
    """Compare the runs in ``directory`` with the kept ones in a table, and say how many of its rows agree."""
    rows = [row for part in parts for row in compared(part.name, part.results(), part.results(directory))]
    apart = sum(row[-1] == "apart" for row in rows)
    agreement = f"""
    {len(rows) - apart} of {len(rows)} rows agree with docs/results: they are identical, equal within the page's margin,
    or inside the {COVERAGE:.0%} prediction interval of the kept runs, which one row in twenty misses by chance.
    """
    return f"{table(COLUMNS, rows)}\n\n{paragraph(agreement)}"


def compared(part: str, earlier: Results, later: Results) -> list[tuple[str, ...]]:
    """Return a row for each task, variant and measure that both have, in the order of the kept runs."""
    rows = []
    for task, variant in dict.fromkeys((result.task, result.variant) for result in earlier):
        first, second = (
            [result for result in results if (result.task, result.variant) == (task, variant)]
            for results in (earlier, later)
        )
        for measure in (REWARD, ACCURACY):
            before, after = (
                [v for result in group if (v := measure.of(result)) is not None] for group in (first, second)
            )
            if before and after:
                cells = (spread(values, measure.digits) for values in (before, after))
                rows.append((part, task, variant, measure.name, *cells, verdict(first, second, measure)))
    return rows


def verdict(earlier: Results, later: Results, measure: Measure) -> str:
    """Say whether new runs of a variant agree with the kept ones by a measure.

    Runs with a common seed are "identical" if they have the same numbers to the last digit. Otherwise the means are
    "equal" if they differ by less than the margin, "within the spread" if the new mean lies in the prediction interval
    of the kept values (Student's t, mean +- t s sqrt(1/n + 1/m)), else "apart".
    """
    by_seed = {result.seed: result for result in earlier}
    pairs = [(by_seed[result.seed], result) for result in later if result.seed in by_seed]
    if pairs and all(measure.exact(one) == measure.exact(other) for one, other in pairs):
        return "identical"
    before, after = (_values(results, measure) for results in (earlier, later))
    difference = abs(statistics.fmean(after) - statistics.fmean(before))
    if difference < measure.margin:
        return "equal"
    if len(before) < 2:
        return "apart"
    half = t_quantile((1 + COVERAGE) / 2, len(before) - 1) * statistics.stdev(before)
    return "within the spread" if difference <= half * math.sqrt(1 / len(before) + 1 / len(after)) else "apart"


def _values(results: Sequence[Result], measure: Measure) -> list[float]:
    return [value for result in results if (value := measure.of(result)) is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, make the runs that are missing, and write the page."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--seeds", type=int, help="make the runs of the first SEEDS seeds only; by default of all")
    parser.add_argument("--page-only", action="store_true", help="make no runs, write the page of those that are kept")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="DIRECTORY",
        help="make the runs once more, into a directory, from which an interrupted command continues; compare them "
        "with those that are kept, and write no page",
    )
    args = parser.parse_args(arguments)
    harness.end_in_order()
    logs.configure("results", "warning")
    # Several threads would compute other sums, and a tiny model gains nothing by them.
    torch.set_num_threads(1)
    parts = [part for part in PARTS if part.name in args.only]
    for part in [] if args.page_only else parts:
        part.make(args.seeds, args.again)
    if args.again:
        print(report(parts, args.again))
    else:
        PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
