"""Make the runs of docs/results.md and write the page: ``python -m benchmarks.results [--only PART ...]``.

With ``--again DIRECTORY``, make the runs once more and say whether they agree with those of the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.results import again
from benchmarks.results.pages import NAMES, PAGE, load_parts, page
from services.core import logs


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="PART", help=", ".join(NAMES))
    parser.add_argument("--seeds", type=int, help="make the runs of so many seeds only; by default of all")
    parser.add_argument("--page-only", action="store_true", help="make no runs, write the page of those that are kept")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="DIRECTORY",
        help="make the runs once more, into a directory that also lets an interrupted command go on; compare them with "
        "those that are kept, and write no page",
    )
    given = parser.parse_args(arguments)
    harness.end_in_order()
    logs.configure("results", "warning")
    # Several threads would compute other sums, and a tiny model gains nothing by them.
    torch.set_num_threads(1)
    parts = load_parts(given.only)
    for part in [] if given.page_only else parts:
        part.make(given.seeds, given.again)
    if given.again:
        print(again.report(parts, given.again))
    else:
        PAGE.write_text(page(load_parts()))


if __name__ == "__main__":
    main()
