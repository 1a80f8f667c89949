"""``grpo status``: the state of a run and of its nodes."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner.launch import grpo_command
from local_runner.nodes import health_address, trainer_address
from local_runner.supervisor import State
from local_runner.view import STYLES, present
from services.run_page import components
from services.run_page.directory import RUNNING, Run, find_run

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


async def print_status(console: Console, run: Run, token: str | None) -> None:
    """Print state, figures and nodes of a run; ``token`` is that of its job group."""
    state, nodes = run.state, run.nodes
    is_running = state == RUNNING
    addresses = nodes.endpoints if nodes is not None and nodes.is_here and is_running else {}
    page = trainer_address(addresses)
    states = nodes.states if nodes is not None else {}
    async with components.questioner(token) as http:
        trainer = None if page is None else await components.ask_trainer(http, page)
        names = [log.stem for log in run.logs()]
        rows = await asyncio.gather(*(_node(http, run, addresses, name, states.get(name, "")) for name in names))
    summary, outcome = ({}, {}) if is_running else (run.summary, run.outcome)
    present(console, run, state, summary, outcome, trainer)
    table = Table(box=None, pad_edge=False)
    for column in ("component", "state", "address", "error") if is_running else ("component", "error"):
        table.add_column(column, overflow="fold")
    for name, node_state, address, error in rows:
        if is_running:
            table.add_row(name, node_state, address, error)
        elif error:
            table.add_row(name, error)
    if table.row_count:
        console.print(table)
    where = shlex.join([grpo_command(), "view", str(run.path)]) if page is None else f"http://{page}"
    console.print(f"run page  {where}", highlight=False, soft_wrap=True)


async def _node(
    http: httpx.AsyncClient, run: Run, addresses: Mapping[str, str], name: str, recorded: str
) -> tuple[str, Text, str, Text]:
    """Return a node's name, its state if it is asked, its address, and its last error.

    An unreachable node has the state that the runner ``recorded``: one that runs and was never up is starting.
    """
    address = health_address(addresses, name)
    state = NOT_ASKED if address is None else await components.ask_state(http, address)
    if state == components.SILENT and recorded not in ("", components.UP):
        state = "starting" if recorded == State.RUNNING else recorded
    style = STYLES.get(state, "dim" if address is None else "yellow")
    return name, Text(state, style), address or "", Text(run.last_error(name) or "", "red")
