"""The numbers of docs/guides/operating.md are exported."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_every_number_is_exported() -> None:
    [_, section] = (DOCS / "guides/operating.md").read_text().split("\n## By numbers")
    cells = re.findall(r"^\| `([^`]+)`", section.partition("\n## ")[0], re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"\w+", cell)}
    columns = re.findall(r"^\| (`[^|]+`) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    known = {name for cell in columns for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 8
    assert named <= known
