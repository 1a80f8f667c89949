"""Files in docs/ that a program writes, and whose being up to date `make test` checks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_or_check(target: Path, text: str, module: str, arguments: Sequence[str]) -> int:
    """Writes the file, or with --check says whether it is up to date; returns the exit code.

    Args:
        target: the file.
        text: what it should hold.
        module: that makes it, for the message.
        arguments: of the command line.
    """
    if "--check" not in arguments:
        target.write_text(text)
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    sys.stderr.write(f"{target} is out of date; run: python -m {module}\n")
    return 1
