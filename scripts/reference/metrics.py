"""Write docs/metrics.md from the components' metrics: ``python -m scripts.reference.metrics [--check]``."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from prometheus_client import REGISTRY

from scripts.reference import ROOT, write_or_check

TARGET = ROOT / "docs" / "metrics.md"

MODULES = (
    "services.http.app",
    "services.http.client",
    "services.data_server.app",
    "services.embedded_engine.http.app",
    "services.reward_server.app",
    "services.replay_buffer.app",
    "services.gateway.app",
    "services.environment_server.app",
    "services.evaluation_head.app",
    "services.evaluation_head.torch_policy",
    "trainer.collector",
    "trainer.rollouts.episodes",
    "trainer.reporting.metrics",
    "trainer.publishing.publisher",
)
"""The modules whose import registers all metrics."""

TABLES = (
    ("Every component", ("http_", "client_")),
    ("ppo-trainer", ("trainer_", "teacher_")),
    ("ppo-trainer and collectors", ("rollout_", "collector_")),
    ("data-server", ("data_",)),
    ("rollout-server: engine", ("sglang:", "engine_")),
    ("reward-server", ("reward_",)),
    ("replay-buffer", ("replay_",)),
    ("gateway", ("gateway_",)),
    ("environment-server", ("environment_",)),
    ("evaluation-head", ("head_",)),
)
"""The heading of each table, and the prefixes of its metrics."""
HEAD = "| metric | kind | labels | meaning |\n|---|---|---|---|"
STANDARD = ("python_", "process_", "stamina_")
"""Prefixes of metrics that prometheus_client and stamina register by themselves."""

INTRODUCTION = """# Metrics

Every component serves `/metrics` in Prometheus' text format, on its own port; the router's are on :29000 of
rollout-server's node 0, whose :30000 has those of all engines at `/engine_metrics`. Where there is a
`JOBGROUP_TOKEN`, the scraper sends it as bearer token. `process_*`, `python_*` and `stamina_*` come from libraries.
Import [grafana.json](grafana.json) for a dashboard: it asks for the data source.

SGLang exports further metrics. The metrics below that begin with `sglang:` come from the embedded engine, too.

This page is generated from the code by `make docs`; `make test` checks that it is up to date.
"""

COLUMNS = """## Columns of metrics.jsonl

The trainer's numbers of each step, and the metric of each. A counter adds up the numbers of all steps; a gauge has the
newest one.

| column | meaning | metric |
|---|---|---|"""


@dataclass(frozen=True)
class Exported:
    """A metric as the components export it; a histogram's name is without suffixes."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]


def exported() -> dict[str, Exported]:
    """Import the components, and return their metrics by name."""
    for module in MODULES:
        importlib.import_module(module)
    metrics = {}
    for collector in list(REGISTRY._collector_to_names):
        for family in getattr(collector, "describe", list)():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = tuple(getattr(collector, "_labelnames", ()))
            if not name.startswith(STANDARD):
                metrics[name] = Exported(name, family.type, family.documentation, labels)
    return dict(sorted(metrics.items()))


def page() -> str:
    """Return the whole page."""
    metrics = exported()
    parts = [INTRODUCTION]
    for heading, prefixes in TABLES:
        of_table = [metric for name, metric in metrics.items() if name.startswith(prefixes)]
        rows = [f"| `{metric.name}` | {metric.kind} | {_code(metric.labels)} | {metric.help} |" for metric in of_table]
        parts.append("\n".join([f"## {heading}\n", HEAD, *rows, ""]))
    return "\n".join([*parts, COLUMNS, *_columns(), ""])


def _columns() -> list[str]:
    from trainer.reporting.metrics import DERIVED, MEASURES, NAMED

    rows = []
    for measure in (*MEASURES, *(measure for measure, _ in NAMED)):
        labels = ",".join(f'{name}="{value}"' for name, value in measure.labels.items())
        rows.append(f"| `{measure.column}` | {measure.help} | `{measure.name}{f'{{{labels}}}' if labels else ''}` |")
    return rows + [f"| `{column}` | {text} | |" for column, text in DERIVED.items()]


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date with --check; return the exit code."""
    return write_or_check(TARGET, page(), "scripts.reference.metrics", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
