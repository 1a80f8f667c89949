r"""The answer in LaTeX's ``\boxed{}``, which datasets and models write alike."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")


def last_boxed(text: str, *, allow_open: bool = False) -> str | None:
    r"""Return the trimmed content of the last ``\boxed{}`` or ``\fbox{}`` whose braces balance, None without one.

    With ``allow_open``, a text whose only boxes are never closed gives the rest of the line behind the first of them.
    """
    opened: list[int | None] = []
    last: str | None = None
    for token in _TOKENS.finditer(text):
        kind = token.group()
        if kind.startswith(("\\boxed", "\\fbox")):
            opened.append(token.end())
        elif kind == "{":
            opened.append(None)
        elif kind == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = text[start : token.start()]
    if last is None and allow_open:
        start = next((start for start in opened if start is not None), None)
        if start is not None:
            last = text[start:].split("\n", 1)[0].rstrip("$. ") or None
    return last.strip() if last is not None else None
