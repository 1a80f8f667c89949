"""The printed end of a run: its outcome, rewards and duration, and the next commands."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from local_runner.commands import Launch, next_commands, shown_path
from local_runner.directory import all_runs, usage
from local_runner.environment import Run
from local_runner.learning import advice, counted, failed
from local_runner.progress import GrowingFile, new_steps
from local_runner.view import duration
from services.run_page.directory import read_object


def trainer_summary(run: Run, since: float) -> dict[str, Any]:
    """Return the trainer's summary.json; empty if it has written none after ``since``, a time of ``time.time``."""
    path = run.run_dir / "summary.json"
    return read_object(path) if path.exists() and path.stat().st_mtime >= since else {}


def show(console: Console, run: Run, launch: Launch | None, outcome: dict[str, Any], summary: dict[str, Any]) -> None:
    """Print the end of a run.

    Args:
        console: for the output.
        run: the run.
        launch: the command line that started it; None: a program did, and no commands are printed.
        outcome: the content of runner.json.
        summary: the trainer's summary.json; empty if the trainer has written none.
    """
    table = Table(show_header=False, title=f"run {run.run_id}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if summary:
        for name in ("model", "dataset", "device", "steps"):
            table.add_row(name, str(summary.get(name)))
        table.add_row(*reward_change(summary))
    steps = new_steps(GrowingFile(run.run_dir / "metrics.jsonl"))
    if (share := failed(steps)) is not None:
        table.add_row("failed completions", share)
    for name, value in outcome_rows(outcome, summary):
        table.add_row(name, value)
    table.add_row("directory", shown_path(run.run_dir))
    table.add_row("disk space", decimal(usage(run.run_dir)[0]))
    console.print(table)
    if said := advice(steps):
        console.print(Text(said, "yellow"), soft_wrap=not console.is_terminal)
    if launch is None:
        return
    runs = all_runs(run.run_dir.parent)
    size = decimal(sum(usage(path)[0] for path in runs))
    place = shown_path(run.run_dir.parent)
    console.print(f"size of all runs in {place}/: {size}", highlight=False, soft_wrap=True)
    for purpose, command in next_commands(run, launch, summary, outcome.get("exit_code", 0)):
        # Each command is a line of its own and complete, to be copied, however narrow the terminal.
        console.print(Text(f"\n{purpose}:", "bold"))
        console.print(Text(f"  {command}"), soft_wrap=True)


def reward_change(rewards: dict[str, Any]) -> tuple[str, str]:
    """Return label and text for the mean rewards of the first and of the last steps, as summary.json has them."""
    steps, first, last = rewards.get("reward_steps", 0), rewards.get("reward_first"), rewards.get("reward_last")
    if first is None or last is None:
        return "mean reward", "none" if first is None else f"{first:.3f}, of the only step"
    label = "mean reward, first to last step" if steps == 1 else f"mean reward, first to last {steps} steps"
    return label, f"{first:.3f} → {last:.3f}"


def outcome_rows(outcome: dict[str, Any], summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of an ended run, with their labels, from its runner.json and summary.json, which may be empty."""
    rows = []
    left_out: Counter[str] = Counter(summary.get("rows_left_out"))
    if left_out:
        rows.append(("rows left out", f"{left_out.total()} of {summary['rows']} ({counted(left_out)})"))
    if summary.get("accuracy_after") is not None:
        rows += [_accuracy(summary, when) for when in ("before", "after")]
    if error := summary.get("evaluation_error"):
        rows.append(("last evaluation", f"no accuracy: {error}"))
    if outcome:
        rows.append(("outcome", outcome["reason"]))
        rows.append(("time of last attempt", duration(outcome["seconds"])))
    if summary.get("seconds") is not None:
        rows.append(("time of training, all attempts", duration(summary["seconds"])))
    if restarts := outcome.get("restarts"):
        rows.append(("restarts", ", ".join(f"{task} {count}" for task, count in restarts.items())))
    return rows


def _accuracy(summary: dict[str, Any], when: str) -> tuple[str, str]:
    """Return label and text of the accuracy ``before`` or ``after``, with its interval and its number of prompts."""
    parts = ("", "_low", "_high", "_prompts")
    value, low, high, prompts = (summary.get(f"accuracy_{when}{part}") for part in parts)
    if value is None:
        return f"accuracy {when}", "not measured"
    # Summaries of earlier releases have no interval.
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    count = "" if prompts is None else f"{prompts} "
    return f"accuracy {when}, {count}held-out prompt{'' if prompts == 1 else 's'}", f"{value:.3f}{interval}"
