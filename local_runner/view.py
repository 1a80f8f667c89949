"""The presentation of a run on a terminal, which ``grpo run``, ``grpo status`` and ``train`` share.

``View`` shows a run as it happens, in lines; ``present`` shows its figures.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner import nodes
from local_runner.launch import shown_path
from local_runner.nodes import health_address, trainer_address
from local_runner.spec import TaskSpec
from local_runner.supervisor import State
from services.core.endpoints import Task
from services.run_page.directory import RUNNING, Run
from services.run_page.progress import ReportTimer, Row, counted, failed, first_and_last, in_words, of_sources, phases
from services.run_page.rules import NOTE

Json = Mapping[str, Any]

TAIL_LINES = 15
RECENT_STEPS = 5
"""Steps from whose seconds the time left is estimated."""
SHOWN_FINDINGS = 3
"""Findings of a run that its figures end with."""
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
    "wrong": "bold red",
    "doubt": "yellow",
}
"""The style of each state of a node or a run, and of the severities of findings."""


def present(console: Console, run: Run, state: str, summary: Json, outcome: Json, trainer: Json | None = None) -> None:
    """Print the state of a run, its figures, and its findings.

    Args:
        console: for the output.
        run: the run.
        state: the run's state.
        summary: the content of summary.json of a run that has ended; empty if the trainer has written none.
        outcome: the content of runner.json of a run that has ended; empty without one.
        trainer: the reply of the trainer's /stats if it answers.
    """
    line = Text.assemble(("run ", "dim"), (run.name, "bold"), "  ", (state, STYLES.get(state, "yellow")))
    console.print(line.append(f", {trainer['phase']}") if trainer else line)
    table = Table.grid(padding=(0, 2))
    for name, value in _figures(run, state, summary, outcome, trainer):
        table.add_row(Text(name, "dim"), Text(value))
    console.print(table)
    found = [finding for finding in run.findings() if finding.severity != NOTE]
    for finding in found[:SHOWN_FINDINGS]:
        console.print(Text(str(finding), STYLES[finding.severity]), soft_wrap=not console.is_terminal)
    if len(found) > SHOWN_FINDINGS:
        console.print(Text(f"and {len(found) - SHOWN_FINDINGS} more: grpo diagnose {run.path}"), soft_wrap=True)


def _figures(run: Run, state: str, summary: Json, outcome: Json, trainer: Json | None) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run with their labels; see ``present``."""
    if trainer:
        yield "now", in_words(trainer["activity"])
    yield from ((name, str(summary[name])) for name in ("model", "dataset", "device") if name in summary)
    steps, total = run.steps(), trainer["total_steps"] if trainer else 0
    last = steps[-1]["step"] if steps else summary.get("steps")
    if last is not None:
        yield "steps", f"{last} of {total}" if total else str(last)
        rewards = [row["reward_mean"] for row in steps if row.get("reward_mean") is not None]
        yield reward_change(summary if "reward_first" in summary else first_and_last(rewards))
    for source, own in summary.get("sources", {}).items():
        accuracies = " → ".join(f"{accuracy:.3f}" for accuracy in own["accuracies"] or ())
        yield f"reward of {source}", reward_change(own)[1] + (f"; accuracy {accuracies}" if accuracies else "")
    if (share := failed(steps)) is not None:
        yield "failed completions", share
    if state == RUNNING and steps:
        mean = statistics.fmean(row.get("seconds_step", 0.0) for row in steps[-RECENT_STEPS:])
        left = mean * (total - steps[-1]["step"])
        yield "a step", duration(mean) + (f", {duration(left)} left" if total else "")
    yield from outcome_rows(outcome, summary)
    if failure := run.first_failure():
        yield "first failed answer", failure


def reward_change(rewards: Json) -> tuple[str, str]:
    """Return label and text for the mean rewards of the first and of the last steps, as summary.json has them."""
    steps, first, last = rewards.get("reward_steps", 0), rewards.get("reward_first"), rewards.get("reward_last")
    if first is None or last is None:
        return "mean reward", "none" if first is None else f"{first:.3f}, of the only step"
    label = "mean reward, first to last step" if steps == 1 else f"mean reward, first to last {steps} steps"
    return label, f"{first:.3f} → {last:.3f}"


def outcome_rows(outcome: Json, summary: Json) -> Iterator[tuple[str, str]]:
    """Yield the rows of an ended run, with their labels, from its runner.json and summary.json, which may be empty."""
    left_out: Counter[str] = Counter(summary.get("rows_left_out"))
    if left_out:
        yield "rows left out", f"{left_out.total()} of {summary['rows']} ({counted(left_out)})"
    if summary.get("accuracy_after") is not None:
        yield from (_accuracy(summary, when) for when in ("before", "after"))
    if error := summary.get("evaluation_error"):
        yield "last evaluation", f"no accuracy: {error}"
    if outcome:
        yield "outcome", outcome["reason"]
        yield "time of last attempt", duration(outcome["seconds"])
    if summary.get("seconds") is not None:
        yield "time of training, all attempts", duration(summary["seconds"])
    if restarts := outcome.get("restarts"):
        yield "restarts", ", ".join(f"{task} {count}" for task, count in restarts.items())


def _accuracy(summary: Json, when: str) -> tuple[str, str]:
    """Return label and text of the accuracy ``before`` or ``after``, with its interval and its number of prompts."""
    parts = ("", "_low", "_high", "_prompts")
    value, low, high, prompts = (summary.get(f"accuracy_{when}{part}") for part in parts)
    if value is None:
        return f"accuracy {when}", "not measured"
    label = f"accuracy {when}, {prompts} held-out prompt{'' if prompts == 1 else 's'}"
    return label, f"{value:.3f} ({low:.3f} to {high:.3f})"


class View:
    """The events of a run, printed as they happen."""

    def __init__(self, run: nodes.LocalRun, console: Console) -> None:
        """Print where the logs and the page of the run are."""
        self._run, self.files = run, Run(run.run_dir)
        self._console = console
        ranks = [(task.name, rank) for task in run.group.tasks for rank in range(task.num_nodes)]
        self._states = dict.fromkeys(ranks, State.WAITING.value)
        self._total_steps = 0
        self._explained: dict[str, str] = {}
        self._found: set[str] = set()
        """The rules whose findings were shown."""
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._failure = ""
        self._changed = time.time()
        """When a node last changed its state."""
        self._report_timer = ReportTimer()
        console.print(f"run {run.run_id}, logs in {shown_path(run.run_dir / 'logs')}", highlight=False, soft_wrap=True)
        if (page := trainer_address(run.addresses.endpoints)) is not None:
            where = f"run page http://{page}, from when ppo-trainer-0 is up until the run ends"
            console.print(where, highlight=False, soft_wrap=True)

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

    def step(self, row: Row) -> None:
        """Show a step that ended, and what is newly found to be wrong with the run."""
        self._seconds.append(row.get("seconds_step", 0.0))
        left = statistics.fmean(self._seconds) * (self._total_steps - row["step"])
        line = Text(describe(row, self._total_steps, max(left, 0.0)))
        if self._console.is_terminal:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(line, soft_wrap=True)
        for finding in self.files.findings():
            if finding.severity != NOTE and finding.rule not in self._found:
                self._found.add(finding.rule)
                self._say(str(finding), STYLES[finding.severity])

    def failure(self, text: str) -> None:
        """Show the first answer that failed because of the user's own code, once; nothing for an empty text."""
        if text and text != self._failure:
            self._say(f"an answer failed: {text}", "red")
        self._failure = text or self._failure

    @property
    def states(self) -> dict[str, str]:
        """The state of each node by ``{task}-{rank}``."""
        return {f"{task}-{rank}": state for (task, rank), state in self._states.items()}

    def trainer(self, stats: Json | None) -> None:
        """Show the trainer's /stats, or which nodes are not up while the trainer is not; None if it did not answer."""
        if stats is not None:
            self._total_steps, activity = stats["total_steps"], stats["activity"]
        elif self._states[Task.TRAINER, 0] in STARTING:
            endpoints = self._run.addresses.endpoints
            asked = {node: state for node, state in self.states.items() if health_address(endpoints, node) is not None}
            missing = ", ".join(node for node, state in asked.items() if state in STARTING)
            done = f"{list(asked.values()).count('up')} of {len(asked)} up"
            activity = {"what": f"waiting for {missing}", "done": done, "since": self._changed, "until": None}
        else:
            return  # a trainer at work may be too busy to answer
        if self._report_timer.is_due(activity["since"], is_early=not self._seconds):
            self._say(in_words(activity), "dim")

    def lost_watcher(self, watcher: asyncio.Task[None]) -> None:
        """Say that a task which watched the run for this view ended with an error."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._say(f"steps and health are no longer shown, the run is not affected: {error!r}", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        # A terminal would break long lines within words; elsewhere programs read them, so they stay whole.
        self._console.print(Text(text, style=style), soft_wrap=not self._console.is_terminal)

    def _explain(self, task: TaskSpec, rank: int) -> None:
        """Print why a node failed: the last error that it logged, else the end of its log."""
        node = f"{task.name}-{rank}"
        error = self.files.last_error(node)
        if error is None:
            end = "\n".join(f"  {line}" for line in self.files.log_end(node)[-TAIL_LINES:])
            self._say(f"the end of {shown_path(self._run.log(task, rank))}:\n{end}", "dim")
        elif error != self._explained.get(task.name):
            self._say(f"  {error}", "red")
            self._explained[task.name] = error


def describe(row: Row, total_steps: int, seconds_left: float) -> str:
    """Return a step's line: number, reward, failed completions, loss, seconds by phase, time left, failure.

    Args:
        row: the step's record.
        total_steps: steps of the run; 0 while unknown.
        seconds_left: seconds until the last step; 0 after it, and while unknown.
    """
    loss, reward, seconds = row.get("loss"), row.get("reward_mean"), phases(row)
    parts = [f"step {row['step']}/{total_steps}" if total_steps else f"step {row['step']}"]
    parts.append("no reward" if reward is None else f"reward {reward:.3f}")
    if by_source := of_sources(row, "reward_mean"):
        parts[-1] += f" ({', '.join(f'{source} {own:.3f}' for source, own in by_source.items())})"
    if (share := failed([row])) is not None:
        parts.append(f"failed {share}")
    if loss is not None:
        parts.append(f"loss {loss:+.4f}")
    elif row.get("trained_tokens") == 0 and reward is not None:
        parts.append("equal rewards")
    if seconds:
        least = SHOWN_SHARE * seconds.get("step", 0.0)
        parts.append(" ".join(f"{phase} {value:.1f}s" for phase, value in seconds.items() if value > least))
    if seconds_left:
        parts.append(f"{duration(seconds_left)} left")
    parts += [f"{reason}: {message}" for reason, _, message in row.get("failures", ())[:1]]
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
