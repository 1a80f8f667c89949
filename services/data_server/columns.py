"""The columns of a dataset that have its questions and its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings

_QUESTION = ("question", "prompt", "problem")
_ANSWER = ("answer", "ground_truth", "solution")

ReadTable = Callable[[], pa.Table]
"""A function that maps the columns of a split into memory anew at each call: question, answer, perhaps ground_truth
(otherwise found in the answers) and category. Once an earlier table is gone, the pages that it read no longer count as
this process's memory."""
CATEGORY = "category"
EXACT = 2.0**53
"""Below it, every whole number has a double of its own."""
SETTINGS = {"question": "PROMPT_COLUMN", "answer": "GROUND_TRUTH_COLUMN"}
"""The settings that name the columns whose values must be text or numbers."""


def choose(names: Sequence[str], where: str, settings: DataSettings) -> dict[str, str]:
    """Return the columns of question, answer and perhaps category, as ``{"question": ..., "answer": ...}``.

    Args:
        names: the columns of the dataset.
        where: the dataset, for messages, such as ``DATASET 'rows.jsonl'``.
        settings: give the columns, or leave them to the usual names.

    Raises:
        ConfigurationError: the dataset lacks a column.
    """
    question = _choose(names, where, "PROMPT_COLUMN", settings.prompt_column, _QUESTION)
    if list(names) == [question] and settings.ground_truth_column is None:
        raise ConfigurationError(
            f"{where} has no column besides {question!r}; add one with the answers, such as 'answer'"
        )
    chosen = {
        "question": question,
        "answer": _choose(names, where, "GROUND_TRUTH_COLUMN", settings.ground_truth_column, _ANSWER),
    }
    return chosen | ({CATEGORY: CATEGORY} if CATEGORY in names else {})


def _choose(names: Sequence[str], where: str, setting: str, given: str | None, usual: tuple[str, ...]) -> str:
    if given is not None and given not in names:
        raise ConfigurationError(f"{setting} is {given!r}, which {where} lacks; it has {list(names)}")
    found = given or next((name for name in usual if name in names), None)
    if found is None:
        raise ConfigurationError(
            f"{where} has none of the columns {', '.join(usual)}; set {setting} to one of {list(names)}"
        )
    return found
