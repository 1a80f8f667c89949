"""``grpo status``: the state of a run and of its nodes."""

from __future__ import annotations

import asyncio
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner import health
from local_runner.directory import OUTCOME, RUNNING, find_run, grpo_command, last_error, read_nodes, state_of
from local_runner.health import TrainerStatus
from local_runner.nodes import health_address, trainer_address
from local_runner.progress import GrowingFile, advice, failed, mean_rewards, new_steps
from local_runner.summary import outcome_rows, reward_change
from local_runner.supervisor import State
from local_runner.view import STYLES, duration
from services.core.files import read_object
from services.run_page.directory import first_and_last, first_failure

RECENT_STEPS = 5
NOT_ASKED = "without /health"
"""The state of a node that does not listen, such as all but the first of the trainer."""


def main(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or directory. Default: the newest run below runs/.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="JOBGROUP_TOKEN", show_envvar=True, help="Of a job group that has one.")
    ] = None,
) -> None:
    """Show the state of a run and of its components."""
    asyncio.run(print_status(Console(), find_run(run), token))


async def print_status(console: Console, run_dir: Path, token: str | None) -> None:
    """Print state, figures and nodes of a run; ``token`` is that of its job group."""
    state, nodes = state_of(run_dir), read_nodes(run_dir)
    is_running = state == RUNNING
    addresses = nodes.endpoints if nodes is not None and nodes.is_here and is_running else {}
    logs = sorted((run_dir / "logs").glob("*.log"))
    page = trainer_address(addresses)
    states = nodes.states if nodes is not None else {}
    async with health.client(token) as http:
        trainer = None if page is None else await health.trainer_status(http, page)
        rows = await asyncio.gather(*(_node(http, addresses, log, states.get(log.stem, "")) for log in logs))
    line = Text.assemble(("run ", "dim"), (run_dir.name, "bold"), "  ", (state, STYLES.get(state, "yellow")))
    console.print(line.append(f", {trainer.phase}") if trainer else line)
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(run_dir, trainer, is_running=is_running):
        figures.add_row(Text(name, "dim"), Text(value))
    console.print(figures)
    if shown := _table(rows, is_running=is_running):
        console.print(shown)
    where = shlex.join([grpo_command(), "view", str(run_dir)]) if page is None else f"http://{page}"
    console.print(f"run page  {where}", highlight=False, soft_wrap=True)


def _table(rows: Sequence[tuple[str, Text, str, Text]], *, is_running: bool) -> Table | None:
    """Return the table of the components; of an ended run, of those with an error, and None without one."""
    table = Table(box=None, pad_edge=False)
    for column in ("component", "state", "address", "error") if is_running else ("component", "error"):
        table.add_column(column, overflow="fold")
    for name, state, address, error in rows:
        if is_running:
            table.add_row(name, state, address, error)
        elif error:
            table.add_row(name, error)
    return table if table.row_count else None


async def _node(
    http: httpx.AsyncClient, addresses: Mapping[str, str], log: Path, recorded: str
) -> tuple[str, Text, str, Text]:
    """Return the name of the log's node, its state if it is asked, its address, and its last error.

    An unreachable node has the state that the runner ``recorded``: one that runs and was never up is starting.
    """
    address = health_address(addresses, log.stem)
    state = NOT_ASKED if address is None else await health.state(http, address)
    if state == health.SILENT and recorded not in ("", health.UP):
        state = "starting" if recorded == State.RUNNING else recorded
    style = STYLES.get(state, "dim" if address is None else "yellow")
    if state == health.BUSY and address == trainer_address(addresses):
        state = _busy_trainer(log.parents[1] / "metrics.jsonl")
    return log.stem, Text(state, style), address or "", Text(last_error(log) or "", "red")


def _busy_trainer(metrics: Path) -> str:
    """Return for how long a trainer that is too busy to answer has been at work since its last step."""
    steps = new_steps(GrowingFile(metrics))
    if not steps:
        return "busy before its first step"
    return f"busy for {duration(time.time() - metrics.stat().st_mtime)} since step {steps[-1].step}"


def _figures(run_dir: Path, trainer: TrainerStatus | None, *, is_running: bool) -> list[tuple[str, str]]:
    """Return the figures of a run with their labels."""
    steps = new_steps(GrowingFile(run_dir / "metrics.jsonl"))
    rows = [("now", trainer.doing)] if trainer else []
    if steps:
        last, total = steps[-1].step, trainer.total_steps if trainer else 0
        rows.append(("steps", f"{last} of {total}" if total else str(last)))
        rows.append(reward_change(first_and_last(mean_rewards(steps))))
        if (share := failed(steps)) is not None:
            rows.append(("failed completions", share))
        if is_running:
            mean = statistics.fmean(step.seconds.get("step", 0.0) for step in steps[-RECENT_STEPS:])
            left = f", {duration(mean * (total - last))} left" if total else ""
            rows.append(("a step", f"{duration(mean)}{left}"))
    if not is_running:
        rows += outcome_rows(read_object(run_dir / OUTCOME), read_object(run_dir / "summary.json"))
    if failure := first_failure(run_dir):
        rows.append(("first failed answer", failure))
    if hint := advice(steps):
        rows.append(("advice", hint))
    return rows
