"""The variables that components used to read, each with what does its work now."""

from __future__ import annotations

from collections.abc import Iterable

REMOVED: dict[str, str] = {
    "PUBLISH_DELTA": "every version has all weights; PUBLISH_TRANSPORT=broadcast sends them past a slow volume",
}
"""The words that say what does the work of a removed variable, by its name."""


def removed_among(names: Iterable[str]) -> list[str]:
    """Return a sentence for each of the ``names`` that is a removed variable, in upper or lower case."""
    return [f"{name} is no setting any more; {REMOVED[name.upper()]}" for name in names if name.upper() in REMOVED]
