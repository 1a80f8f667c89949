"""Write docs/metrics.md from the components' metrics: ``python -m scripts.reference.metrics [--check]``."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from prometheus_client import REGISTRY

from scripts.reference import ROOT, write_or_check

TARGET = ROOT / "docs" / "metrics.md"
STANDARD = ("python_", "process_", "stamina_")
"""Prefixes of metrics that prometheus_client and stamina register by themselves."""


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


def tables() -> str:
    """Return the tables of metrics with their labels, and of the columns of metrics.jsonl with the metric of each."""
    from trainer.reporting.metrics import DERIVED, MEASURES, NAMED

    of_columns = {measure.name for measure in MEASURES}
    lines = ["## All metrics", "", "| metric | meaning |", "|---|---|"]
    for name, metric in exported().items():
        if name not in of_columns:
            labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
            kind = "Histogram: " if metric.kind == "histogram" else ""
            lines.append(f"| `{name}{labels}` | {kind}{metric.help} |")
    lines += ["", "## Columns of metrics.jsonl", "", "| column | meaning | metric |", "|---|---|---|"]
    for measure in (*MEASURES, *(measure for measure, _ in NAMED)):
        values = ",".join(f'{name}="{value}"' for name, value in measure.labels.items())
        lines.append(f"| `{measure.column}` | {measure.help} | `{measure.name}{f'{{{values}}}' if values else ''}` |")
    return "\n".join([*lines, *(f"| `{column}` | {text} | |" for column, text in DERIVED.items()), ""])


def main(arguments: list[str]) -> int:
    """Write the tables, or check that they are up to date with --check; return the exit code."""
    return write_or_check(TARGET, tables(), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
