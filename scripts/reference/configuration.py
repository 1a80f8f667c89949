"""Write docs/configuration.md from the settings classes: ``python -m scripts.reference.configuration [--check]``."""

from __future__ import annotations

import inspect
import sys

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from local_runner.checks import READERS
from scripts.reference import ROOT, write_or_check
from services.core.settings import ADVANCED, Settings

TARGET = ROOT / "docs" / "configuration.md"


def tables() -> str:
    """Return the tables of all components and sections of settings; what several share is explained once."""
    explained: set[str] = set()
    parts = ["## All components\n", _table(Settings.model_fields, Settings, explained)]
    for reader in READERS:
        settings = reader.settings_class()
        parts.append(f"## {reader.heading}\n")
        # A class without fields of its own is made of sections.
        if settings.__annotations__:
            parts.append(_table(_own_fields(settings), settings, explained))
            continue
        for section in settings.__bases__:
            assert issubclass(section, Settings)
            parts += [f"### {section.__name__.removesuffix('Section')}\n", f"{inspect.getdoc(section)}\n"]
            if read_with := vars(section).get("read_with"):
                parts.append(f"Read with `{read_with}` alone.\n")
            parts.append(_table(_own_fields(section), section, explained))
    return "\n".join(parts)


def _own_fields(settings: type[Settings]) -> dict[str, FieldInfo]:
    return {name: field for name, field in settings.model_fields.items() if name not in Settings.model_fields}


def _table(fields: dict[str, FieldInfo], settings: type[Settings], explained: set[str]) -> str:
    """Return the table of fields of a class, and a second one of those whose text ends with ADVANCED.

    Variables whose default and text are in ``explained`` already are listed by name; the others are added to it.
    """
    meanings = {name: " ".join((field.description or "").split()).replace("|", "\\|") for name, field in fields.items()}
    texts = {name: f"{name}={_default(field)} {meanings[name]}" for name, field in fields.items()}
    shared = [name for name, text in texts.items() if text in explained]
    explained.update(texts.values())
    of_all = vars(settings).get("read_with")
    for name, choices in settings.choices().items():
        if own := [f"`{choice.replace('|', ' or ')}`" for choice in choices if choice != of_all]:
            text = meanings[name].removesuffix(ADVANCED).rstrip()
            meanings[name] = (
                f"{text} Read with {' and '.join(own)} alone. {ADVANCED * meanings[name].endswith(ADVANCED)}"
            )
    rows = {
        name: f"| `{name.upper()}` | {_default(field)} | {meanings[name].removesuffix(ADVANCED).rstrip()} |"
        for name, field in fields.items()
    }
    usual, advanced = (
        [row for name, row in rows.items() if name not in shared and meanings[name].endswith(ADVANCED) is is_advanced]
        for is_advanced in (False, True)
    )
    lines = ["| variable | default | meaning |", "|---|---|---|", *usual, ""] if usual else []
    if advanced:
        lines += ["Advanced:\n", "| variable | default | meaning |", "|---|---|---|", *advanced, ""]
    if shared:
        lines += [f"Also, as above: {', '.join(f'`{name.upper()}`' for name in shared)}.", ""]
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined or field.default is None:
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date with --check; return the exit code."""
    return write_or_check(TARGET, tables(), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
