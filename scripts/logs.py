"""Shows the logs of a run's components: ``python -m scripts.logs [-f] [RUN] [TASK...]``, of the newest by default."""

from __future__ import annotations

import heapq
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from local_runner.directory import find_run, named_run, read_nodes
from local_runner.supervisor import LIFE_MARK
from services.core.errors import ConfigurationError, exit_code_of

POLL_SECONDS = 0.2
# At the start of a line, or where LOG_FORMAT=json puts it. The runner's own marks have local time and are left out.
TIMESTAMP = re.compile(r'(?:\{.*?"timestamp": ?")?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d[.\d]*)')
LEVELS = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
NODE_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")


@dataclass
class Log:
    """The log of one node, read as it grows."""

    path: Path
    position: int = 0
    time: str = ""

    @property
    def node(self) -> str:
        """Such as ``ppo-trainer-0``."""
        return self.path.stem

    def new_lines(self) -> Iterator[tuple[str, str, str]]:
        """Time, node and text of each complete line since the last call. A line without time has the former's."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.position += len(line)
                text = line.decode(errors="replace").rstrip("\r\n")
                if (match := TIMESTAMP.match(text)) is not None:
                    self.time = f"{match[1]}T{match[2]}"
                yield self.time, self.node, text


def find_logs(run_dir: Path, tasks: list[str]) -> list[Log]:
    """The logs of ``tasks``, which are tasks or nodes of them; of all where none is named.

    Raises:
        ConfigurationError: there is no log of a task.
    """
    paths = sorted((run_dir / "logs").glob("*.log"))
    names = [path.stem for path in paths]
    for task in tasks:
        if not any(_is_of(name, task) for name in names):
            raise ConfigurationError(
                f"{task} is no run, and there is no log of it in {run_dir / 'logs'}: {', '.join(names) or 'none'}"
            )
    return [Log(path) for path in paths if not tasks or any(_is_of(path.stem, task) for task in tasks)]


def choose_run(names: list[str], run: str | None = None) -> tuple[Path, list[str]]:
    """Return the run, and the tasks, that ``names`` say: the first may be a run, unless ``run`` names one.

    Raises:
        ConfigurationError: there is no such run.
    """
    if run is None and names and (found := named_run(names[0])) is not None:
        return found, names[1:]
    return find_run(run), names


def _is_of(node: str, task: str) -> bool:
    return node == task or node.rpartition("-")[0] == task


class Printer:
    """Prints lines, with the node in front where there are several; colours only on a terminal."""

    def __init__(self, console: Console, nodes: list[str]) -> None:
        self._console = console
        self._width = max(map(len, nodes), default=0)
        self._colours = {node: NODE_COLOURS[i % len(NODE_COLOURS)] for i, node in enumerate(nodes)}

    def show(self, node: str, line: str) -> None:
        """Prints one line."""
        text = Text(f"{node:{self._width}} │ ", self._colours[node]) if len(self._colours) > 1 else Text()
        self._console.print(text.append(line, _style(line)), soft_wrap=True, highlight=False)


def _style(line: str) -> str:
    if line.startswith(LIFE_MARK):
        return "bold"
    if line.startswith("error: "):
        return LEVELS["error"]
    words = line.split(" ", 2)
    return LEVELS.get(words[1], "") if len(words) > 2 and TIMESTAMP.match(words[0]) else ""


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [TASK]...",
            help="A run's id or directory, by default the newest run below runs/; then tasks such as ppo-trainer, or "
            "nodes such as ppo-trainer-1.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only so many of the last lines.")] = None,
    run: Annotated[str | None, typer.Option(hidden=True)] = None,  # the former way, until the next version
) -> None:
    """Shows the logs of a run's components, in the order of time."""

    def work() -> None:
        run_dir, tasks = choose_run(names or [], run)
        logs = find_logs(run_dir, tasks)
        printer = Printer(Console(), [log.node for log in logs])
        for _, node, line in deque(heapq.merge(*(log.new_lines() for log in logs)), maxlen=lines):
            printer.show(node, line)
        nodes = read_nodes(run_dir)
        while follow:
            # Asked first, so that the last lines of a run that just ended are still read.
            goes_on = nodes is not None and nodes.is_running()
            for _, node, line in heapq.merge(*(log.new_lines() for log in logs)):
                printer.show(node, line)
            if not goes_on:
                break
            time.sleep(POLL_SECONDS)

    try:
        sys.exit(exit_code_of(work))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    typer.run(main)
