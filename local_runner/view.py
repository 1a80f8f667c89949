"""The runner's output: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from local_runner.commands import shown_path
from local_runner.environment import Run
from local_runner.health import TrainerStatus, trainer_address
from local_runner.progress import Step
from local_runner.spec import TaskSpec
from local_runner.supervisor import START_MARK, State

SILENT_AFTER = 30
"""A node that was up counts as silent after this many unanswered requests in a row."""
TAIL_LINES = 15
PACE_SECONDS = 86_400
"""The time left is estimated from the steps within this time."""

_STYLES = {
    "up": "green",
    "ended": "green",
    "failed": "bold red",
    "silent": "bold yellow",
    "restarting": "yellow",
    "stopped": "dim",
}


@dataclass
class _Node:
    state: str = State.WAITING.value
    unanswered: int = 0


class View:
    """The events of a run, printed as they happen. A context manager, which keeps a live view on a terminal."""

    def __init__(self, run: Run, console: Console, *, live: bool) -> None:
        self._run = run
        self._console = console
        self._nodes = {(task.name, rank): _Node() for task in run.group.tasks for rank in range(task.num_nodes)}
        self._total_steps = 0
        self._explained: dict[str, str] = {}
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            "{task.description}",
            "{task.fields[phase]}",
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, speed_estimate_period=PACE_SECONDS)
        self._steps = self._progress.add_task("no step yet", total=None, phase="starting")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4) if live else None

    def __enter__(self) -> View:
        logs = shown_path(self._run.run_dir / "logs")
        self._console.print(f"run {self._run.run_id}, logs in {logs}", highlight=False, soft_wrap=True)
        page = trainer_address(self._run.addresses.endpoints)
        if page is not None:
            self._console.print(f"run page http://{page} once the trainer is up", highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The last picture stays on the terminal.
        if self._live is not None:
            self._live.stop()

    def state(self, task: TaskSpec, rank: int | None, state: State, why: str) -> None:
        """Show the new state of a node, or with ``rank`` None of a whole task."""
        for own_rank in range(task.num_nodes) if rank is None else [rank]:
            self._nodes[task.name, own_rank] = _Node(state.value)
        name = task.name if rank is None else f"{task.name}-{rank}"
        self._say(f"{name} {state.value}, {why}", _STYLES.get(state.value, ""))
        if state is State.FAILED and rank is not None:
            self._explain(task, rank)

    def health(self, task: str, rank: int, is_up: bool) -> None:
        """Show that a node answered or did not."""
        node = self._nodes[task, rank]
        if node.state not in (State.RUNNING, "up", "silent"):
            return
        node.unanswered = 0 if is_up else node.unanswered + 1
        if is_up and node.state != "up":
            node.state = "up"
            self._say(f"{task}-{rank} up", "green")
        elif node.state == "up" and node.unanswered >= SILENT_AFTER:
            node.state = "silent"
            self._say(f"{task}-{rank} does not answer", "bold yellow")

    def step(self, step: Step) -> None:
        """Show a step that ended."""
        self._progress.update(self._steps, completed=step.step, description=f"reward {step.reward:.3f}")
        left = self._progress.tasks[self._steps].time_remaining
        is_terminal = self._console.is_terminal
        line = Text(describe(step, self._total_steps, left))
        self._console.print(line, soft_wrap=not is_terminal, no_wrap=is_terminal, overflow="ellipsis")

    def trainer(self, status: TrainerStatus) -> None:
        """Show the trainer's status."""
        self._total_steps = status.total_steps
        self._progress.update(self._steps, total=status.total_steps or None, phase=status.phase)

    def lost_watcher(self, watcher: asyncio.Task[None]) -> None:
        """Say that a task which watched the run for this view ended with an error."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._say(f"steps and health are shown no more, the run is not affected: {error!r}", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        # A terminal would break long lines within words; elsewhere programs read them, so they stay whole.
        self._console.print(Text(text, style=style), soft_wrap=not self._console.is_terminal)

    def _explain(self, task: TaskSpec, rank: int) -> None:
        """Print why a node failed: the last error that it logged, else the end of its log."""
        log = self._run.log(task, rank)
        error = last_error(log)
        if error is None:
            end = "\n".join(f"  {line}" for line in lines_since_start(log)[-TAIL_LINES:])
            self._say(f"the end of {shown_path(log)}:\n{end}", "dim")
        elif error != self._explained.get(task.name):
            self._say(f"  {error}", "red")
            self._explained[task.name] = error

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for column in ("component", "state", "address"):
            table.add_column(column, overflow="fold")
        for (task, rank), node in self._nodes.items():
            state = Text(node.state, style=_STYLES.get(node.state, ""))
            table.add_row(f"{task}-{rank}", state, self._run.addresses.hosts[task][rank])
        return Group(Text(), table, self._progress)


def lines_since_start(log: Path) -> list[str]:
    """Return the lines of a node's log since the node's last start."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    start = max((number for number, line in enumerate(lines) if line.startswith(START_MARK)), default=-1)
    return lines[start + 1 :]


def last_error(log: Path) -> str | None:
    """Return the line in which a node named the error that ended it; None if its last start logged none."""
    return next((line for line in reversed(lines_since_start(log)) if line.startswith("error: ")), None)


def describe(step: Step, total_steps: int, seconds_left: float | None) -> str:
    """Return a step's line: number, reward, loss, seconds by phase, time left.

    Args:
        step: the step.
        total_steps: steps of the run; 0 while unknown.
        seconds_left: seconds until the last step; None while unknown, 0 after it.
    """
    parts = [f"step {step.step}/{total_steps}" if total_steps else f"step {step.step}", f"reward {step.reward:.3f}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:+.4f}")
    if step.seconds:
        parts.append(" ".join(f"{phase} {value:.1f}s" for phase, value in step.seconds.items()))
    if seconds_left:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return ``45s``, ``3m05s``, ``2h07m`` or ``12d``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d"
