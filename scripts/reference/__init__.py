"""Programs that write the tables of pages in docs/; `make test` checks that the pages are up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_or_check(target: Path, tables: str, arguments: list[str]) -> int:
    """Write a page's tables, or with --check compare them; return the exit code.

    What the page has above its first second-level heading is written by hand, and stays.

    Args:
        target: the page.
        tables: its text from the first second-level heading on.
        arguments: the program's command line.
    """
    present = target.read_text(encoding="utf-8")
    text = present.partition("\n## ")[0] + f"\n{tables}"
    if "--check" not in arguments:
        target.write_text(text, encoding="utf-8")
    elif present != text:
        sys.stderr.write(f"{target} is out of date; run: make docs\n")
        return 1
    return 0
