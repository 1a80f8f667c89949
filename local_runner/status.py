"""The state of a run and of its nodes, as ``scripts.status`` prints it."""

from __future__ import annotations

import asyncio
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner import health
from local_runner.commands import module
from local_runner.directory import Nodes, read_nodes, read_object, state_of
from local_runner.health import TrainerStatus
from local_runner.progress import GrowingFile, new_steps
from local_runner.summary import accuracy_change, restarts_text, reward_change
from local_runner.view import duration, last_error
from services.run_page.rewards import first_and_last

RECENT_STEPS = 5
STYLES = {"up": "green", "succeeded": "green", "running": "green", "failed": "bold red", "silent": "yellow"}


@dataclass(frozen=True)
class NodeStatus:
    """The state of one node."""

    name: str
    state: str
    """``up``, ``silent`` or the status in the reply of /health; empty once the run has ended."""
    address: str
    error: str | None
    """The last error in the node's log since its last start."""


async def show(console: Console, run_dir: Path, token: str | None) -> None:
    """Print state, figures and nodes of a run; ``token`` is that of its job group."""
    nodes = read_nodes(run_dir)
    is_running = nodes is not None and nodes.is_running()
    page = None if nodes is None else health.trainer_address(nodes.endpoints)
    trainer = None
    if is_running and page is not None:
        async with health.client(token) as http:
            trainer = await health.trainer_status(http, page)
    components = await _ask_nodes(run_dir, nodes)
    state = state_of(run_dir, nodes)
    line = Text.assemble(("run ", "dim"), (run_dir.name, "bold"), "  ", (state, STYLES.get(state, "yellow")))
    console.print(line.append(f", {trainer.phase}") if trainer else line)
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(run_dir, trainer, is_running=state == "running"):
        figures.add_row(Text(name, "dim"), value)
    console.print(figures)
    table = Table(box=None, pad_edge=False)
    for column in ("component", "state", "address", "error"):
        table.add_column(column, overflow="fold")
    for node in components:
        styled = Text(node.state, STYLES.get(node.state, "yellow"))
        table.add_row(node.name, styled, node.address, Text(node.error or "", "red"))
    console.print(table)
    is_served = state == "running" and page is not None
    where = f"http://{page}" if is_served else shlex.join([*module("scripts.view"), str(run_dir)])
    console.print(f"run page  {where}", highlight=False, soft_wrap=True)


async def _ask_nodes(run_dir: Path, nodes: Nodes | None) -> list[NodeStatus]:
    """Return the state of every node that has a log; only the nodes of a running run are asked."""
    is_running = nodes is not None and nodes.is_running()
    async with health.client() as http:

        async def ask(log: Path) -> NodeStatus:
            address = None if nodes is None else health.health_address(nodes.endpoints, log.stem)
            state = await _health(http, address) if is_running and address is not None else ""
            return NodeStatus(log.stem, state, address or "", last_error(log))

        return list(await asyncio.gather(*map(ask, sorted((run_dir / "logs").glob("*.log")))))


async def _health(http: httpx.AsyncClient, address: str) -> str:
    response = await health.get(http, address, "/health")
    if response is None:
        return "silent"
    if response.status_code == httpx.codes.OK:
        return "up"
    is_json = response.headers.get("content-type", "").startswith("application/json")
    return str(response.json().get("status", "unhealthy")) if is_json and response.content else "unhealthy"


def _figures(run_dir: Path, trainer: TrainerStatus | None, *, is_running: bool) -> list[tuple[str, str]]:
    """Return the figures of a run with their labels."""
    steps = new_steps(GrowingFile(run_dir / "metrics.jsonl"))
    summary = read_object(run_dir / "summary.json")
    runner = read_object(run_dir / "runner.json")
    rows = []
    if steps:
        last, total = steps[-1].step, trainer.total_steps if trainer else 0
        rows.append(("steps", f"{last} of {total}" if total else str(last)))
        rows.append(reward_change(first_and_last([step.reward for step in steps])))
        seconds = [step.seconds["step"] for step in steps[-RECENT_STEPS:] if "step" in step.seconds]
        if seconds and is_running:
            mean = statistics.fmean(seconds)
            left = f", {duration(mean * (total - last))} left" if total else ""
            rows.append(("a step", f"{duration(mean)}{left}"))
    if not is_running and summary.get("accuracy_after") is not None:
        rows.append(("accuracy on held-out prompts", accuracy_change(summary)))
    if not is_running and runner:
        rows.append(("outcome", runner["reason"]))
        rows.append(("time, from start to end", duration(runner["seconds"])))
        if runner["restarts"]:
            rows.append(("restarts", restarts_text(runner["restarts"])))
    return rows
