"""The end of a run: the outcome, the time it took, a few completions before and after, and the next commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner.commands import Launch, next_commands, shown_path
from local_runner.directory import all_runs, read_object, usage, write_object
from local_runner.environment import Run
from local_runner.processes import MemoryMeter
from local_runner.supervisor import Outcome
from local_runner.view import duration, gigabytes

FILES = {"model": "trained model", "reward.png": "reward curve", "checkpoints": "checkpoints", "logs": "logs"}
"""Files and directories that the end of a run points to, with their names there."""
SHOWN_COMPLETIONS = 3
LONGEST_COMPLETION = 200
"""Characters of a prompt or completion that are shown."""


@dataclass(frozen=True)
class BeforeAndAfter:
    """A held-out prompt with its greedy completions and their rewards at the first and at the last evaluation."""

    prompt: str
    before: str
    after: str
    reward_before: float | None
    reward_after: float | None


def record(run: Run, outcome: Outcome, meter: MemoryMeter) -> None:
    """Write ``runner.json`` into the run directory: what the run took, for benchmarks to read."""
    content = {
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 2),
        "peak_memory_bytes": meter.peak,
        "peak_memory_bytes_by_node": {node: used for node, used in sorted(meter.peak_by_node.items()) if node},
        "restarts": outcome.restarts,
    }
    write_object(run.run_dir / "runner.json", content)


def trainer_summary(run: Run, since: float) -> dict[str, Any] | None:
    """Return the trainer's summary.json; None when it has written none after ``since`` (a time of ``time.time``)."""
    path = run.run_dir / "summary.json"
    return read_object(path) if path.exists() and path.stat().st_mtime >= since else None


def show(
    console: Console,
    run: Run,
    launch: Launch,
    outcome: Outcome,
    peak_memory_bytes: int,
    summary: dict[str, Any] | None,
) -> None:
    """Print the end of a run."""
    table = Table(show_header=False, title=f"run {run.run_id}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(run, outcome, peak_memory_bytes, summary or {}):
        table.add_row(name, value)
    console.print(table)
    if summary:
        show_completions(console, read_completions(run.run_dir))
    runs = all_runs(run.run_dir.parent)
    taken = gigabytes(sum(usage(path).size for path in runs))
    count = "1 run takes" if len(runs) == 1 else f"{len(runs)} runs take"
    console.print(f"{count} {taken} in {shown_path(run.run_dir.parent)}/", highlight=False, soft_wrap=True)
    for what, command in next_commands(run, launch, summary or {}):
        # Each command is a line of its own and whole, to be copied, however narrow the terminal.
        console.print(Text(f"\n{what}:", "bold"))
        console.print(Text(f"  {command}"), soft_wrap=True)


def reward_change(rewards: dict[str, Any]) -> tuple[str, str]:
    """Return label and text for the mean rewards of the first and of the last steps, as summary.json has them."""
    steps, first, last = rewards.get("reward_steps", 0), rewards.get("reward_first"), rewards.get("reward_last")
    if first is None or last is None:
        return "mean reward", "no step" if first is None else f"{first:.3f}, of the only step"
    # Summaries of earlier runs do not say how many steps; they took three.
    label = "mean reward, first to last step" if steps == 1 else f"mean reward, first to last {steps or 3} steps"
    return label, f"{first:.3f} → {last:.3f}"


def accuracy_change(summary: dict[str, Any]) -> str:
    """Return the accuracies before and after the run, with their standard errors where the summary has them."""
    return " → ".join(_with_error(summary, name) for name in ("accuracy_before", "accuracy_after"))


def _with_error(summary: dict[str, Any], name: str) -> str:
    value, stderr = summary.get(name), summary.get(f"{name}_stderr")
    if value is None:
        return "not measured"
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def read_completions(run_dir: Path) -> list[BeforeAndAfter]:
    """Return the first prompts of evaluations.jsonl that were answered at the first and at the last evaluation."""
    path = run_dir / "evaluations.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not records or records[0]["step"] == records[-1]["step"]:
        return []
    first, last = records[0]["step"], records[-1]["step"]
    after = {record["prompt"]: record for record in records if record["step"] == last}
    return [
        BeforeAndAfter(
            before["prompt"],
            before["completion"],
            after[before["prompt"]]["completion"],
            before["reward"],
            after[before["prompt"]]["reward"],
        )
        for before in records
        if before["step"] == first and before["prompt"] in after
    ][:SHOWN_COMPLETIONS]


def show_completions(console: Console, completions: list[BeforeAndAfter]) -> None:
    """Print held-out prompts with their completions before and after training."""
    if not completions:
        return
    console.print("held-out prompts, greedy completions", style="italic")
    table = Table(show_lines=True)
    for column in ("prompt", "before", "after"):
        table.add_column(column, overflow="fold")
    for shown in completions:
        table.add_row(
            Text(_excerpt(shown.prompt)),
            _judged(shown.before, shown.reward_before),
            _judged(shown.after, shown.reward_after),
        )
    console.print(table)


def _rows(run: Run, outcome: Outcome, peak_memory_bytes: int, summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("outcome", outcome.reason)]
    if summary:
        rows += [
            ("model", str(summary.get("model"))),
            ("dataset", str(summary.get("dataset"))),
            ("device", str(summary.get("device"))),
            ("steps", str(summary.get("steps"))),
            reward_change(summary),
            ("accuracy on held-out prompts", accuracy_change(summary)),
        ]
    rows.append(("time, from start to end", duration(outcome.seconds)))
    if summary.get("seconds") is not None:
        rows.append(("time of training, all attempts", duration(summary["seconds"])))
    rows.append(("peak memory of all processes", f"{peak_memory_bytes / 1e9:.1f} GB"))
    if outcome.restarts:
        rows.append(("restarts", ", ".join(f"{name} {count}" for name, count in outcome.restarts.items())))
    files = (
        ("model", "trained model"),
        ("reward.png", "reward curve"),
        ("checkpoints", "checkpoints"),
        ("logs", "logs"),
    )
    rows += [(what, shown_path(run.run_dir / name)) for name, what in files if (run.run_dir / name).exists()]
    return rows


def _judged(completion: str, reward: float | None) -> Text:
    said = "not scored" if reward is None else f"reward {reward:g}"
    return Text.assemble(_excerpt(completion), "\n", (said, "dim"))


def _excerpt(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST_COMPLETION else text[:LONGEST_COMPLETION] + " ..."
