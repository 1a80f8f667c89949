"""Write the tables of pages of docs/ (see PAGES) from the code: ``python -m scripts.reference [--check]``.

`make test` checks that the pages are up to date.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from prometheus_client import REGISTRY
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from local_runner.checks import READERS
from services.core.settings import ADVANCED, Settings
from services.run_page.rules import RULES

ROOT = Path(__file__).parents[1]
STANDARD = ("python_", "process_", "stamina_")
"""Prefixes of metrics that prometheus_client and stamina register by themselves."""


def settings_tables() -> str:
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
    choices = settings.choices()
    usual, advanced = list[str](), list[str]()
    for name in [name for name in fields if name not in shared]:
        own = [f"`{choice.replace('|', ' or ')}`" for choice in choices.get(name, ()) if choice != of_all]
        read_with = f" Read with {' and '.join(own)} alone." if own else ""
        text = meanings[name].removesuffix(ADVANCED).rstrip() + read_with
        row = f"| `{name.upper()}` | {_default(fields[name])} | {text} |"
        (advanced if meanings[name].endswith(ADVANCED) else usual).append(row)
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


class Exported(NamedTuple):
    """A metric as the components export it; a histogram's name is without suffixes."""

    kind: str
    help: str
    labels: tuple[str, ...]


def exported() -> dict[str, Exported]:
    """Import every module that makes metrics, and return these by name."""
    for file in sorted(path for part in ("services", "trainer") for path in (ROOT / part).rglob("*.py")):
        if "from prometheus_client" in file.read_text(encoding="utf-8"):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    metrics = {}
    for collector in list(REGISTRY._collector_to_names):
        for family in getattr(collector, "describe", list)():
            name = family.name + ("_total" if family.type == "counter" else "")
            if not name.startswith(STANDARD):
                labels = tuple(getattr(collector, "_labelnames", ()))
                metrics[name] = Exported(family.type, family.documentation, labels)
    return dict(sorted(metrics.items()))


def metrics_tables() -> str:
    """Return the tables of metrics with their labels, and of the columns of metrics.jsonl with the metric of each."""
    from trainer.reporting.metrics import DERIVED, MEASURES, NAMED

    measures = [*MEASURES, *(measure for measure, _ in NAMED)]
    columns: dict[tuple[str, str], list[str]] = defaultdict(list)
    for measure in measures:
        columns[measure.help, measure.name].append(f"`{measure.column}`")
    metrics = exported()
    names = {name: f"`{name}{{{','.join(metric.labels)}}}`".replace("{}", "") for name, metric in metrics.items()}
    lines = ["## All metrics", "", "| metric | meaning |", "|---|---|"]
    for name in metrics.keys() - {measure.name for measure in measures}:
        kind = "Histogram: " if metrics[name].kind == "histogram" else ""
        lines.append(f"| {names[name]} | {kind}{metrics[name].help} |")
    lines[4:] = sorted(lines[4:])
    lines += ["", "## Columns of metrics.jsonl", "", "| column | meaning | metric |", "|---|---|---|"]
    lines += [f"| {', '.join(of_metric)} | {text} | {names[name]} |" for (text, name), of_metric in columns.items()]
    return "\n".join([*lines, *(f"| `{column}` | {text} | |" for column, text in DERIVED.items()), ""])


def rules_table() -> str:
    """Return the table of the rules that judge a run."""
    lines = ["## What it says", "", "| finding | severity | symptom | cause | remedy |", "|---|---|---|---|---|"]
    for rule in RULES:
        cause = f"{rule.certainty}: {rule.cause}" if rule.cause else "named by the failure"
        lines.append(f"| {rule.name} | {rule.severity} | {rule.symptom} | {cause} | {rule.remedy} |")
    return "\n".join([*lines, ""])


def models_table() -> str:
    """Return the table of the families of models that were tried."""
    from transformers import AutoConfig

    from services.embedded_engine.families import FAMILIES as PACKED
    from trainer.model.attention import obstacle_to_trees
    from trainer.model.families import FAMILIES

    columns = "models | model_type | layers | layout | LoRA | embedded engine | SGLang | calls of tools | what has run"
    lines = ["## Families", "", f"| {columns} |", f"|{'---|' * 9}"]
    for family in FAMILIES:
        layout = "rows" if obstacle_to_trees(AutoConfig.for_model(family.kind, **family.options)) else "trees"
        lora = "yes" if family.has_adapters else "no"
        engine = "packed" if family.kind in PACKED else "transformers'"
        sglang = family.sglang if family.sglang_lora else f"{family.sglang}, without LoRA"
        known = [f"`{family.kind}`", family.layers, layout, lora, engine, sglang, family.calls, family.ran]
        lines.append(f"| {' | '.join([family.models, *known])} |")
    return "\n".join([*lines, ""])


PAGES = {
    ROOT / "docs/configuration.md": settings_tables,
    ROOT / "docs/metrics.md": metrics_tables,
    ROOT / "docs/models.md": models_table,
    ROOT / "docs/guides/diagnosing.md": rules_table,
}
"""The function that returns a page's text from its first second-level heading on; what is above is written by hand."""


def main(arguments: list[str]) -> int:
    """Write the tables of all pages, or with --check compare them; return the exit code."""
    code = 0
    for page, tables in PAGES.items():
        present = page.read_text(encoding="utf-8")
        text = present.partition("\n## ")[0] + f"\n{tables()}"
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
        elif present != text:
            sys.stderr.write(f"{page} is out of date; run: make docs\n")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
