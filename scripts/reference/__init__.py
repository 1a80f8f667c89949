"""Programs that write pages in docs/; `make test` checks that the pages are up to date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_or_check(target: Path, text: str, module: str, arguments: Sequence[str]) -> int:
    """Write the file, or with --check compare it with ``text``; return the exit code.

    Args:
        target: the file.
        text: its content.
        module: the program that writes it, for the message.
        arguments: the program's command line.
    """
    if "--check" not in arguments:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{target} is out of date; run: python -m {module}\n")
    return 1
