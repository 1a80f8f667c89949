"""Writes docs/configuration.md from the settings classes: ``python -m scripts.configuration_reference [--check]``."""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scripts.generated import ROOT, write_or_check
from services.settings import Settings

TARGET = ROOT / "docs" / "configuration.md"

# Heading, module and class of each table, in the order of the page.
TABLES = (
    ("Trainer and collectors", "trainer.config", "TrainerSettings"),
    ("data-server", "services.data_server.settings", "DataSettings"),
    ("rollout-server", "services.rollout_server.settings", "RolloutSettings"),
    ("reward-server", "services.reward_server.settings", "RewardSettings"),
    ("replay-buffer", "services.replay_buffer.settings", "ReplaySettings"),
    ("environment-server", "services.environment_server.settings", "EnvironmentSettings"),
    ("evaluation-head", "services.evaluation_head.settings", "HeadSettings"),
    ("Evaluation of checkpoints", "scripts.evaluation.settings", "EvaluationSettings"),
)

INTRODUCTION = """# Configuration

Every component reads environment variables. `sky jobs launch jobgroup.yaml --env NAME=VALUE` (or `python -m
scripts.run_local jobgroup.yaml --env NAME=VALUE`) gives a variable to every task; each component reads its own and
stops with one line when a value is not allowed. An empty value is as good as none.

This page is generated from the settings classes by `make docs`; `make test` checks that it is up to date.
"""


def page() -> str:
    """The whole page."""
    classes = [(heading, settings_class(module, name)) for heading, module, name in TABLES]
    common = set(Settings.model_fields)
    parts = [INTRODUCTION, "## All components\n", _table(Settings.model_fields)]
    for heading, its_class in classes:
        own = {name: field for name, field in its_class.model_fields.items() if name not in common}
        parts += [f"## {heading}\n", _table(own)]
    return "\n".join(parts)


def settings_class(module: str, name: str) -> type[Settings]:
    """The class, whose module is imported only here."""
    found: type[Settings] = getattr(importlib.import_module(module), name)
    return found


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = [
        f"| `{name.upper()}` | {_default(field)} | {_text(field.description or '')} |" for name, field in fields.items()
    ]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows, ""])


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined or value is None:
        return ""
    return (
        f"`{str(value).lower() if isinstance(value, bool) else value.value if isinstance(value, StrEnum) else value}`"
    )


def _text(description: str) -> str:
    return description.replace("|", "\\|").replace("\n", " ")


def main(arguments: list[str]) -> int:
    """Writes the page, or with --check says whether it is up to date."""
    return write_or_check(TARGET, page(), "scripts.configuration_reference", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
