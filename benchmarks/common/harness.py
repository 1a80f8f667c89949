"""The parts that all benchmarks share: command line, rounds in turn, the table and JSON of results, programs to run."""

from __future__ import annotations

import argparse
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import orjson
import torch
from rich.console import Console
from rich.table import Table

from services.core.machine import multiplies_bfloat16
from services.core.processes import end_all

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 60.0
"""Time for a program to stop its own child processes after SIGTERM."""


class Side(Protocol):
    """One of the things that a benchmark compares."""

    @property
    def name(self) -> str:
        """The name in messages and tables."""


S = TypeVar("S", bound=Side)
T = TypeVar("T")


class CommandLine(argparse.ArgumentParser):
    """A parser with the options that all benchmarks have: --rounds, --quick and --json."""

    def __init__(self, name: str, *, rounds: int, quick: str) -> None:
        super().__init__(prog=f"python -m benchmarks.{name}")
        self._rounds = rounds
        self.add_argument("--rounds", type=int, help=f"rounds of each side; default {rounds}, with --quick 1")
        self.add_argument("--quick", action="store_true", help=quick)
        self.add_argument("--json", type=Path, help="also write the measurements to this file")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return the options, and let SIGTERM end the benchmark in order from now on."""
        given = self.parse_args(arguments)
        given.rounds = given.rounds or (1 if given.quick else self._rounds)
        end_in_order()
        return given

    def add_dtype(self) -> None:
        """Add --dtype, by default the type that trainer and engine choose on this processor."""
        self.add_argument(
            "--dtype",
            choices=("bfloat16", "float32"),
            default="bfloat16" if has_bfloat16() else "float32",
            help="that all compute in; default: bfloat16 on processors with instructions for it",
        )


def has_bfloat16() -> bool:
    """Return whether this processor has bfloat16 instructions."""
    return multiplies_bfloat16(torch.cpu.get_capabilities())


def made_of(kind: type[T], given: argparse.Namespace) -> T:
    """Return a dataclass whose fields have the values of the options with their names."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(given).items() if name in names})


def end_in_order() -> None:
    """Let SIGTERM raise SystemExit, so that a benchmark stops the programs that it started."""

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def in_turn(sides: Sequence[S], rounds: int, measure: Callable[[S], str]) -> None:
    """Measure all sides in turn, so that all see the same machine; show on stderr what ``measure`` returns."""
    for number in range(rounds):
        for side in sides:
            say(f"round {number + 1}, {side.name}: {measure(side)}")


def say(line: str) -> None:
    """Write a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, the least and the most of the values as text; "" without values."""
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table whose first column is aligned to the left and the others to the right."""
    made = Table(title=title)
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if place else "left")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def finish(given: argparse.Namespace, shown: Sequence[Table], results: object) -> None:
    """Print the tables, and write the results to the file of --json."""
    Console().print(*shown)
    if given.json:
        given.json.write_bytes(orjson.dumps(results, default=str, option=orjson.OPT_INDENT_2))


@contextmanager
def programs(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], seconds: float | None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run programs side by side. They are killed after ``seconds``, and stopped when the context ends."""
    with ExitStack() as stack:
        running = []
        for command, environment in zip(commands, environments, strict=True):
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(end, process)
            running.append(process)
        if seconds is not None:
            timer = threading.Timer(seconds, _kill, [running])
            timer.start()
            stack.callback(timer.cancel)
        yield running


def _kill(running: Sequence[subprocess.Popen[str]]) -> None:
    for process in running:
        process.kill()


def output_of(process: subprocess.Popen[str], name: str) -> str:
    """Wait for the end of a program and return its standard output.

    Raises:
        SystemExit: the program failed or was killed at its deadline.
    """
    output, _ = process.communicate()
    if process.returncode:
        why = "was killed" if process.returncode < 0 else f"ended with {process.returncode}"
        raise SystemExit(f"error: {name} {why}; its messages are above")
    return output


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Stop a program, and kill it when it does not stop."""
    end_all([process], END_SECONDS)
