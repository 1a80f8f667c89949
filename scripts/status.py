"""Says where a run stands: ``python -m scripts.status [RUN]``, by default the newest run."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner.commands import module
from local_runner.directory import Nodes, find_run, read_nodes, read_object, state_of
from local_runner.summary import accuracy_change, reward_change
from local_runner.view import duration, last_error, last_life
from services.core import endpoints
from services.core.endpoints import Task
from services.core.errors import exit_code_of
from trainer.reporting.run_files import first_and_last

REQUEST_SECONDS = 3.0
RECENT_STEPS = 5
# The ports whose /health stands for a node, in the order in which a node's are tried.
HEALTH_PORTS = (
    endpoints.DATA_PORT,
    endpoints.ENGINE_PORT,
    endpoints.REWARD_PORT,
    endpoints.REPLAY_PORT,
    endpoints.STATUS_PORT,
)
STYLES = {"up": "green", "succeeded": "green", "running": "green", "failed": "bold red", "silent": "yellow"}


@dataclass(frozen=True)
class NodeStatus:
    """What is known of one node: ``state`` is up, silent, or what /health says; for an ended run it is empty."""

    name: str
    state: str
    address: str
    error: str | None


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl that are about steps."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [record for record in records if "reward_mean" in record]


def headline(run_dir: Path, total_steps: int, is_running: bool) -> list[tuple[str, str]]:
    """What there is to say in figures, by name."""
    steps = read_steps(run_dir)
    summary = read_object(run_dir / "summary.json")
    runner = read_object(run_dir / "runner.json")
    rows = []
    if steps:
        last = int(steps[-1]["step"])
        rewards = [step["reward_mean"] for step in steps]
        seconds = [step["seconds_step"] for step in steps[-RECENT_STEPS:] if "seconds_step" in step]
        rows.append(("steps", f"{last} of {total_steps}" if total_steps else str(last)))
        rows.append(reward_change(first_and_last(rewards)))
        if seconds and is_running:
            left = f", {duration(_mean(seconds) * (total_steps - last))} left" if total_steps else ""
            rows.append(("a step", f"{duration(_mean(seconds))}{left}"))
    if not is_running and summary.get("accuracy_after") is not None:
        rows.append(("accuracy on held-out prompts", accuracy_change(summary)))
    if not is_running and runner:
        rows.append(("outcome", runner["reason"]))
        rows.append(("time, from start to end", duration(runner["seconds"])))
        if runner["restarts"]:
            rows.append(("restarts", ", ".join(f"{task} {count}" for task, count in runner["restarts"].items())))
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


async def ask_nodes(run_dir: Path, nodes: Nodes | None) -> list[NodeStatus]:
    """The state of every node that has a log; only nodes of a run that is under way are asked."""
    logs = sorted((run_dir / "logs").glob("*.log"))
    asks = nodes is not None and nodes.is_running()
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, trust_env=False) as client:

        async def ask(log: Path) -> NodeStatus:
            address = _address(nodes, log.stem) if nodes is not None else None
            state = await _health(client, address) if asks and address is not None else ""
            return NodeStatus(log.stem, state, address or "", last_error(last_life(log)))

        return list(await asyncio.gather(*map(ask, logs)))


def _address(nodes: Nodes, node: str) -> str | None:
    # Of the trainer's nodes only the first listens.
    if node.startswith(f"{Task.TRAINER.value}-") and not node.endswith("-0"):
        return None
    return next(
        (nodes.endpoints[f"{node}:{port}"] for port in HEALTH_PORTS if f"{node}:{port}" in nodes.endpoints), None
    )


async def _health(client: httpx.AsyncClient, address: str) -> str:
    try:
        response = await client.get(f"http://{address}/health")
    except httpx.TransportError:
        return "silent"
    if response.status_code == httpx.codes.OK:
        return "up"
    is_json = response.headers.get("content-type", "").startswith("application/json")
    return str(response.json().get("status", "unhealthy")) if is_json and response.content else "unhealthy"


async def ask_trainer(nodes: Nodes | None, token: str | None) -> dict[str, Any]:
    """What the trainer says of itself; empty while it says nothing."""
    address = nodes.endpoints.get(f"{Task.TRAINER.value}-0:{endpoints.STATUS_PORT}") if nodes is not None else None
    if nodes is None or address is None or not nodes.is_running():
        return {}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, trust_env=False, headers=headers) as client:
        try:
            response = await client.get(f"http://{address}/stats")
        except httpx.TransportError:
            return {}
    stats: dict[str, Any] = response.json() if response.status_code == httpx.codes.OK else {}
    return stats


def main(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or directory. Default: the newest run below runs/.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="JOBGROUP_TOKEN", show_envvar=True, help="Of a job group that has one.")
    ] = None,
) -> None:
    """Says where a run stands, and how its components are."""

    def work() -> None:
        directory = find_run(run)
        nodes = read_nodes(directory)
        trainer = asyncio.run(ask_trainer(nodes, token))
        show(Console(), directory, nodes, trainer, asyncio.run(ask_nodes(directory, nodes)))

    sys.exit(exit_code_of(work))


def show(
    console: Console, run_dir: Path, nodes: Nodes | None, trainer: dict[str, Any], components: list[NodeStatus]
) -> None:
    """Prints all of it."""
    state = state_of(run_dir, nodes)
    line = Text.assemble(("run ", "dim"), (run_dir.name, "bold"), "  ", (state, STYLES.get(state, "yellow")))
    if trainer:
        line.append(f", {trainer['phase']}")
    console.print(line)
    figures = Table.grid(padding=(0, 2))
    for name, value in headline(run_dir, trainer.get("total_steps", 0), state == "running"):
        figures.add_row(Text(name, "dim"), value)
    console.print(figures)
    table = Table(box=None, pad_edge=False)
    for column in ("component", "state", "address", "error"):
        table.add_column(column, overflow="fold")
    for node in components:
        state_text = Text(node.state, STYLES.get(node.state, "yellow"))
        table.add_row(node.name, state_text, node.address, Text(node.error or "", "red"))
    console.print(table)
    page = nodes.endpoints.get(f"{Task.TRAINER.value}-0:{endpoints.STATUS_PORT}") if nodes is not None else None
    if state == "running" and page is not None:
        console.print(f"run page  http://{page}", highlight=False, soft_wrap=True)
    else:
        command = shlex.join([*module("scripts.view"), str(run_dir)])
        console.print(f"run page  {command}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
