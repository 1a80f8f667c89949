"""Plain tables of text, for terminals and documents."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with its first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table of ``width`` columns at most, aligned to the left; the widest cells continue in further lines."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        # A column between whose words a line can end gives way before one whose words must be cut.
        spare = [size if size > word else 0 for size, word in zip(widths, words, strict=True)]
        widths[max(range(len(widths)), key=lambda column: (spare[column], widths[column]))] -= 1
    lines = []
    for row in (header, *rows):
        cells = [textwrap.wrap(cell, size, break_on_hyphens=False) for cell, size in zip(row, widths, strict=True)]
        lines += [
            "  ".join(map(str.ljust, parts, widths)).rstrip() for parts in itertools.zip_longest(*cells, fillvalue="")
        ]
    return "\n".join(lines)
