"""What is left to say when a run has ended: the outcome, what it took, and what the trainer summed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.local.environment import Run
from scripts.local.processes import MemoryMeter
from scripts.local.supervisor import Outcome
from scripts.local.view import duration


def record(run: Run, outcome: Outcome, meter: MemoryMeter) -> None:
    """Writes ``runner.json`` into the run directory: what the run took, for benchmarks to read."""
    content = {
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 2),
        "peak_memory_bytes": meter.peak,
        "peak_memory_bytes_by_node": {node: used for node, used in sorted(meter.peak_by_node.items()) if node},
        "restarts": outcome.restarts,
    }
    (run.run_dir / "runner.json").write_text(json.dumps(content, indent=2) + "\n")


def trainer_summary(run: Run, since: float) -> dict[str, Any] | None:
    """The trainer's summary.json; None when it has written none after ``since`` (a time of ``time.time``)."""
    path = run.run_dir / "summary.json"
    if not path.exists() or path.stat().st_mtime < since:
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def show(console: Console, run: Run, outcome: Outcome, peak_memory_bytes: int, summary: dict[str, Any] | None) -> None:
    """Prints the table at the end of a run."""
    table = Table(show_header=False, title=f"run {run.run_id}", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(run, outcome, peak_memory_bytes, summary or {}):
        table.add_row(name, value)
    console.print(table)


def _rows(run: Run, outcome: Outcome, peak_memory_bytes: int, summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("outcome", outcome.reason)]
    if summary:
        rows += [
            ("model", str(summary.get("model"))),
            ("dataset", str(summary.get("dataset"))),
            ("device", str(summary.get("device"))),
            ("steps", str(summary.get("steps"))),
            ("mean reward, first to last 3 steps", _change(summary, "reward_first", "reward_last")),
            ("accuracy on held-out prompts", _change(summary, "accuracy_before", "accuracy_after")),
        ]
    rows += [
        ("time", duration(outcome.seconds)),
        ("peak memory of all processes", f"{peak_memory_bytes / 1e9:.1f} GB"),
    ]
    if outcome.restarts:
        rows.append(("restarts", ", ".join(f"{name} {count}" for name, count in outcome.restarts.items())))
    for name, what in (("reward.png", "reward curve"), ("checkpoints", "checkpoints"), ("logs", "logs")):
        if (path := run.run_dir / name).exists():
            rows.append((what, _from_here(path)))
    return rows


def _change(summary: dict[str, Any], before: str, after: str) -> str:
    return " → ".join(figure(summary, name) for name in (before, after))


def figure(summary: dict[str, Any], name: str) -> str:
    """Return a value of the trainer's summary, with its standard error where it has one."""
    value, stderr = summary.get(name), summary.get(f"{name}_stderr")
    if value is None:
        return "not measured"
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
