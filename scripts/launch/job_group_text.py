"""Edits of a job group's YAML as text, which keep its comments and the order of its lines."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

SEPARATOR = "\n---\n"
ENVS = "envs"


def edited(text: str, changes: Mapping[tuple[str, str], str]) -> str:
    """Return a job group's YAML with other values.

    Args:
        text: the YAML.
        changes: the values, as YAML, by the name of a task and a key such as ``num_nodes`` or ``resources.memory``.
            A key that the file lacks is added.
    """
    header, *documents = text.split(SEPARATOR)
    for number, document in enumerate(documents):
        lines = document.split("\n")
        for (task, key), value in changes.items():
            if lines[0] == f"name: {task}":
                _set(lines, key, value)
        documents[number] = "\n".join(lines)
    return SEPARATOR.join([header, *documents])


def values(text: str) -> dict[tuple[str, str], str]:
    """Return the values of a job group's YAML by task and key, in the form of ``edited``'s ``changes``."""
    by_key = {}
    for document in list(yaml.safe_load_all(text))[1:]:
        for key, value in document.items():
            for name, one in value.items() if isinstance(value, dict) else [(None, value)]:
                by_key[document["name"], f"{key}.{name}" if name else key] = scalar(one)
    return by_key


def scalar(value: object) -> str:
    """Return a value as YAML on one line; a text of a number stays bare, as the files have it."""
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return yaml.safe_dump([value], default_flow_style=True, width=10**6)[1:-2]


def _set(lines: list[str], key: str, value: str) -> None:
    """Set a key of a task's document, whose first line is its name."""
    section, _, name = key.rpartition(".")
    start, indent = 0, ""
    if section:
        if f"{section}:" not in lines:
            lines.append(f"{section}:")
        start, indent = lines.index(f"{section}:"), "  "
    end = start + 1
    while end < len(lines) and (not section or lines[end].startswith(" ")):
        if lines[end].startswith(f"{indent}{name}:"):
            lines[end] = f"{indent}{name}: {value}"
            return
        end += 1
    lines.insert(end if section else 1, f"{indent}{name}: {value}")
