"""The runner's output: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from local_runner.directory import last_error, lines_since_start, shown_path
from local_runner.nodes import Run, health_address, trainer_address
from local_runner.progress import EARLY_STEPS, Step, advice, failed
from local_runner.spec import TaskSpec
from local_runner.supervisor import State
from services.core.endpoints import Task
from services.run_page.activity import ReportTimer, in_words

if TYPE_CHECKING:
    from local_runner.health import TrainerStatus

TAIL_LINES = 15
PACE_SECONDS = 86_400
"""The time left is estimated from the steps within this time."""
SHOWN_SHARE = 0.01
"""A step's line names the phases that take more than this share of its seconds."""

STARTING = (State.WAITING, State.RUNNING, State.RESTARTING)
"""The states of a node that has not answered since its start."""

STYLES = {
    **dict.fromkeys(("up", "running", "ended", "succeeded"), "green"),
    "failed": "bold red",
    "restarting": "yellow",
    "silent": "yellow",
    "stopped": "dim",
}
"""The style of each state of a node or a run."""


class View:
    """The events of a run, printed as they happen. A context manager, which keeps a live view on a terminal."""

    def __init__(self, run: Run, console: Console, *, live: bool) -> None:
        self._run = run
        self._console = console
        ranks = [(task.name, rank) for task in run.group.tasks for rank in range(task.num_nodes)]
        self._states = dict.fromkeys(ranks, State.WAITING.value)
        self._total_steps = 0
        self._explained: dict[str, str] = {}
        self._first_steps: list[Step] = []
        self._failure = ""
        self._changed = time.time()
        """When a node last changed its state."""
        self._doing = ""
        self._report_timer = ReportTimer()
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
            where = f"run page http://{page}, from when ppo-trainer-0 is up until the run ends"
            self._console.print(where, highlight=False, soft_wrap=True)
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
            self._states[task.name, own_rank] = state.value
        self._changed = time.time()
        name = task.name if rank is None else f"{task.name}-{rank}"
        self._say(f"{name} {state.value}, {why}", STYLES.get(state.value, ""))
        if state is State.FAILED and rank is not None:
            self._explain(task, rank)

    def up(self, task: str, rank: int) -> None:
        """Show that a node answered, if it has not since its start."""
        if self._states[task, rank] == State.RUNNING:
            self._states[task, rank] = "up"
            self._changed = time.time()
            self._say(f"{task}-{rank} up", "green")

    def step(self, step: Step) -> None:
        """Show a step that ended, and after EARLY_STEPS the advice on them, if there is any."""
        self._progress.update(self._steps, completed=step.step, description=_reward(step))
        left = self._progress.tasks[self._steps].time_remaining
        line = Text(describe(step, self._total_steps, left))
        if self._console.is_terminal:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(line, soft_wrap=True)
        if len(self._first_steps) < EARLY_STEPS:
            self._first_steps.append(step)
            hint = advice(self._first_steps)
            if hint is not None and len(self._first_steps) == EARLY_STEPS:
                self._say(hint, "yellow")

    def failure(self, text: str) -> None:
        """Show the first answer that failed because of the user's own code, once; nothing for an empty text."""
        if text and text != self._failure:
            self._say(f"an answer failed: {text}", "red")
        self._failure = text or self._failure

    @property
    def states(self) -> dict[str, str]:
        """The state of each node by ``{task}-{rank}``."""
        return {f"{task}-{rank}": state for (task, rank), state in self._states.items()}

    def trainer(self, status: TrainerStatus | None) -> None:
        """Show the trainer's status, or which nodes are not up while the trainer is not; None if it did not answer."""
        if status is not None:
            self._total_steps = status.total_steps
            self._progress.update(self._steps, total=status.total_steps or None, phase=status.phase)
            self._doing, since = status.doing, status.since
        elif self._states[Task.TRAINER, 0] in STARTING:
            nodes = {node: state for node, state in self.states.items() if self._is_asked(node)}
            missing = ", ".join(node for node, state in nodes.items() if state in STARTING)
            done = f"{list(nodes.values()).count('up')} of {len(nodes)} up"
            activity = {"what": f"waiting for {missing}", "done": done, "since": self._changed, "until": None}
            self._doing, since = in_words(activity), self._changed
        else:
            return  # a trainer at work may be too busy to answer
        if self._live is None and self._report_timer.is_due(since, is_early=not self._first_steps):
            self._say(self._doing, "dim")

    def _is_asked(self, node: str) -> bool:
        return health_address(self._run.addresses.endpoints, node) is not None

    def lost_watcher(self, watcher: asyncio.Task[None]) -> None:
        """Say that a task which watched the run for this view ended with an error."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._say(f"steps and health are no longer shown, the run is not affected: {error!r}", "yellow")

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
        for (task, rank), state in self._states.items():
            styled = Text(state, STYLES.get(state, ""))
            table.add_row(f"{task}-{rank}", styled, self._run.addresses.hosts[task][rank])
        return Group(Text(), table, self._progress, Text(self._doing, "dim", no_wrap=True, overflow="ellipsis"))


def describe(step: Step, total_steps: int, seconds_left: float | None) -> str:
    """Return a step's line: number, reward, failed completions, loss, seconds by phase, bytes, time left, failure.

    Args:
        step: the step.
        total_steps: steps of the run; 0 while unknown.
        seconds_left: seconds until the last step; None while unknown, 0 after it.
    """
    parts = [f"step {step.step}/{total_steps}" if total_steps else f"step {step.step}", _reward(step)]
    if (share := failed([step])) is not None:
        parts.append(f"failed {share}")
    if step.loss is not None:
        parts.append(f"loss {step.loss:+.4f}")
    elif step.trained_tokens == 0 and step.reward is not None:
        parts.append("equal rewards")
    if step.seconds:
        least = SHOWN_SHARE * step.seconds.get("step", 0.0)
        parts.append(" ".join(f"{phase} {value:.1f}s" for phase, value in step.seconds.items() if value > least))
    if seconds_left:
        parts.append(f"{duration(seconds_left)} left")
    if step.failures:
        reason, _, message = step.failures[0]
        parts.append(f"{reason}: {message}")
    return "  ".join(parts)


def _reward(step: Step) -> str:
    of_each = ", ".join(f"{source} {reward:.3f}" for source, reward in step.by_source.items())
    reward = "no reward" if step.reward is None else f"reward {step.reward:.3f}"
    return f"{reward} ({of_each})" if of_each else reward


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
