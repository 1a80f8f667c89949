"""Write docs/configuration.md from the settings classes: ``python -m scripts.reference.configuration [--check]``."""

from __future__ import annotations

import inspect
import sys

from pydantic_core import PydanticUndefined

from local_runner.checks import READERS
from scripts.reference import ROOT, write_or_check
from services.core.settings import ADVANCED, Settings

TARGET = ROOT / "docs" / "configuration.md"


def tables() -> str:
    """Return the tables of all components and sections of settings."""
    parts = ["## All components\n", _table(Settings)]
    for reader in READERS:
        settings = reader.settings_class()
        parts.append(f"## {reader.heading}\n")
        # A class without fields of its own is made of sections.
        for section in [] if settings.__annotations__ else settings.__bases__:
            parts += [f"### {section.__name__.removesuffix('Section')}\n", f"{inspect.getdoc(section)}\n"]
            parts.append(_table(section))
        if settings.__annotations__:
            parts.append(_table(settings))
    return "\n".join(parts)


def _table(settings: type[Settings]) -> str:
    """Return the table of a class's own fields, and a second one of those whose text ends with ADVANCED."""
    usual: list[str] = []
    advanced: list[str] = []
    for name, field in settings.model_fields.items():
        if settings is Settings or name not in Settings.model_fields:
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            shown = f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
            default = "" if field.default in (None, PydanticUndefined) else shown
            rows = advanced if meaning.endswith(ADVANCED) else usual
            rows.append(f"| `{name.upper()}` | {default} | {meaning.removesuffix(ADVANCED).rstrip()} |")
    head = ["| variable | default | meaning |", "|---|---|---|"]
    lines = [*head, *usual, ""] if usual else []
    return "\n".join([*lines, "Advanced:\n", *head, *advanced, ""] if advanced else lines)


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date with --check; return the exit code."""
    return write_or_check(TARGET, tables(), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
