"""``grpo status``, ``diagnose`` and ``logs``: the state of a run and of its nodes, its findings, and its logs.

docs/guides/diagnosing.md explains the findings.
"""

from __future__ import annotations

import asyncio
import heapq
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Annotated

import httpx
import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner.launch import grpo_command
from local_runner.nodes import health_address, trainer_address
from local_runner.supervisor import State
from local_runner.view import STYLES, present
from services.core.errors import ConfigurationError
from services.run_page import components
from services.run_page.directory import RUNNING, START_MARK, Run, find_run, named_run, newest
from services.run_page.records import Position, read_lines
from services.run_page.rules import NOTE, RULES

RunName = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Id or directory; default: the newest in runs/.")]
FOUND = 3
"""The exit code of ``diagnose`` if something is found; notes do not count."""
NOT_ASKED = "without /health"
"""The state of a node that does not listen, such as all but the first of the trainer."""


def main(
    run: RunName = None,
    token: Annotated[str | None, typer.Option(envvar="JOBGROUP_TOKEN", help="Of a job group that has one.")] = None,
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


def diagnose(
    run: RunName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with a run, under way, ended or copied. Exit code 3: something is."""
    judged = find_run(run)
    found, steps = judged.findings(), len(judged.steps())
    if not steps:
        raise ConfigurationError(f"{judged.path} has no step yet; grpo status says what it waits for")
    if as_json:
        sys.stdout.buffer.write(orjson.dumps([vars(f) for f in found], option=orjson.OPT_INDENT_2) + b"\n")
    else:
        console = Console()
        for finding in found:
            console.print(Text(str(finding), STYLES.get(finding.severity, "")), soft_wrap=True)
        console.print(f"{len(found)} findings by {len(RULES)} rules in {steps} steps of {judged.name}", highlight=False)
    if any(finding.severity != NOTE for finding in found):
        raise typer.Exit(FOUND)


# --- logs -------------------------------------------------------------------------------------------------------------

POLL_SECONDS = 0.2
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d[.\d]*)")
"""The time at the start of a line. The runner's own lines have local time and do not match."""
NODE_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")

NAMES = "A run, by default the newest in runs/; then tasks such as ppo-trainer, or nodes such as ppo-trainer-1."
Names = Annotated[list[str] | None, typer.Argument(metavar="[RUN] [TASK]...", help=NAMES)]


def logs(
    names: Names = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Continue until the run ends.")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only this many of the last lines.")] = None,
) -> None:
    """Show the logs of a run's components, in the order of time."""
    run, tasks = named_run(names[0]) if names else None, names or []
    show_logs(Console(), run or find_run(None), tasks[1:] if run else tasks, last=lines, follow=follow)


class Log:
    """The log of one node, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.node = path.stem
        self._path, self._position = path, Position()
        self._time = ""

    def new_lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield time, node and text of each line since the last call; a line without time has the previous line's."""
        read = read_lines(self._path, self._position)
        self._position = read.end
        for line in read.lines:
            text = line.decode(errors="replace").rstrip("\r\n")
            if (match := TIMESTAMP.match(text)) is not None:
                self._time = f"{match[1]}T{match[2]}"
            yield self._time, self.node, text


def show_logs(console: Console, run: Run, tasks: list[str], *, last: int | None, follow: bool) -> None:
    """Print the lines of a run's logs, with the node in front if there are several.

    Args:
        console: colours appear on a terminal only.
        run: the run.
        tasks: names of tasks, or of nodes such as ``ppo-trainer-1``; empty for all.
        last: print only this many of the present lines, the last ones; None: all.
        follow: continue until the run ends.

    Raises:
        ConfigurationError: a task has no log.
    """
    found: dict[Path, Log] = {}

    def show_new(last: int | None) -> None:
        # Asked each time, because a node's log is there only when the node has started.
        for path in _find_logs(run, tasks):
            found.setdefault(path, Log(path))
        colours = dict(zip((log.node for log in found.values()), cycle(NODE_COLOURS), strict=False))
        width = max(map(len, colours), default=0)
        for _, node, line in deque(heapq.merge(*(log.new_lines() for log in found.values())), maxlen=last):
            prefix = Text(f"{node:{width}} │ ", colours[node]) if len(found) > 1 else Text()
            style = "bold" if line.startswith((START_MARK, "error: ")) else ""
            console.print(prefix.append(line, style), soft_wrap=True, highlight=False)

    show_new(last)
    is_running = follow
    while is_running:
        # Asked before reading, so that the last lines of a run that just ended are still read.
        is_running = run.state == RUNNING
        show_new(None)
        if is_running:
            time.sleep(POLL_SECONDS)


def _find_logs(run: Run, tasks: list[str]) -> list[Path]:
    paths = run.logs()
    chosen: set[Path] = set()
    for task in tasks:
        of_task = [path for path in paths if task in (path.stem, path.stem.rpartition("-")[0])]
        if not of_task:
            problem = f"{run.path / 'logs'} has no log of it: {', '.join(path.stem for path in paths) or 'none'}"
            raise ConfigurationError(f"{task} is not a run, and {problem}; the newest runs: {newest()}")
        chosen.update(of_task)
    return [path for path in paths if path in chosen or not tasks]
