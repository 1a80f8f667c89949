"""The harness of all benchmarks: a benchmark's sides, rounds, options and tables; programs that it runs."""

from __future__ import annotations

import argparse
import inspect
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import orjson
import torch
from rich.console import Console
from rich.table import Table

from services.core.machine import multiplies_bfloat16

ROOT = Path(__file__).resolve().parents[1]
END_SECONDS = 60.0
"""Time for a program to stop its own child processes after SIGTERM."""

T = TypeVar("T")
Args = argparse.Namespace
"""The options of a command line."""


def has_bfloat16() -> bool:
    """Return whether this processor has bfloat16 instructions."""
    return multiplies_bfloat16(torch.cpu.get_capabilities())


class Option(NamedTuple):
    """An option of a benchmark; its type is that of its default, and a list takes several values."""

    default: Any
    help: str = ""
    choices: Sequence[str] | None = None
    is_required: bool = False


MODEL = Option(".cache/models/smollm2-135m", "model directory or name")
DTYPE = Option(
    "bfloat16" if has_bfloat16() else "float32",
    "that all compute in; default: bfloat16 on processors with instructions for it",
    ("bfloat16", "float32"),
)


@dataclass
class Side:
    """One of the things that a benchmark compares, and the measurements of its rounds."""

    name: str
    measure: Callable[[int], Mapping[str, Any]]
    """Measure a round, whose number is given: each measurement is a value, or a list of equal ones."""
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def values(self, name: str) -> list[Any]:
        """Return a measurement's values of all rounds."""
        rounds = [one[name] for one in self.rounds]
        return [value for one in rounds for value in (one if isinstance(one, list) else [one])]

    def median(self, name: str) -> float:
        """Return the median of a measurement."""
        return float(statistics.median(self.values(name)))

    def spread(self, name: str, digits: int = 2) -> str:
        """Return the median, the least and the most of a measurement as text."""
        return spread(self.values(name), digits)


Columns = Mapping[str, Callable[[Side], object]]
"""The columns of a table by their headings: the text of a side's cell."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: how its sides are measured, and the tables of their measurements."""

    measure: Callable[[Args], list[Side]]
    """Measures all rounds of all sides. Its docstring, what is measured and what counts, is the text of ``--help``."""
    tables: Callable[[Args, Sequence[Side]], list[Table]]
    rounds: int
    """Rounds of each side without --rounds and --quick."""
    quick: Mapping[str, object] = field(default_factory=dict)
    """The values of options with --quick, which has one round."""
    options: Mapping[str, Option] = field(default_factory=dict)
    conclude: Callable[[Args, Sequence[Side]], int] = lambda _args, _sides: 0
    """Say what follows from the measurements, and return the exit code."""

    def parser(self, name: str) -> argparse.ArgumentParser:
        """Return the benchmark's command line."""
        about = (inspect.getdoc(self.measure) or "").partition("\n\nRaises:")[0]
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=about, formatter_class=form)
        parser.add_argument("--rounds", type=int, help=f"rounds of each side; default {self.rounds}, with --quick 1")
        changed = [f"--{option} {value}" for option, value in self.quick.items() if option in self.options]
        parser.add_argument("--quick", action="store_true", help=", ".join(["one round", *changed]))
        parser.add_argument("--json", type=Path, help="also write the measurements to this file")
        for option, (default, text, choices, is_required) in self.options.items():
            flag = f"--{option}"
            if default is False:
                parser.add_argument(flag, action="store_true", help=text)
                continue
            is_list = isinstance(default, list)
            example = next(iter(default), None) if is_list else default
            parser.add_argument(
                flag,
                default=default,
                help=text,
                nargs="+" if is_list else None,
                type=str if example is None else type(example),
                choices=choices,
                required=is_required,
            )
        return parser

    def run(self, name: str, arguments: Sequence[str] | None = None) -> int:
        """Measure by a command line, print the tables, and return the exit code."""
        args = self.parser(name).parse_args(arguments)
        if args.quick:
            vars(args).update({option.replace("-", "_"): value for option, value in self.quick.items()})
        args.rounds = args.rounds or (1 if args.quick else self.rounds)
        end_in_order()
        sides = self.measure(args)
        Console().print(*self.tables(args, sides))
        if args.json:
            measured = {"options": vars(args), "sides": {side.name: side.rounds for side in sides}}
            args.json.write_bytes(orjson.dumps(measured, default=str, option=orjson.OPT_INDENT_2))
        return self.conclude(args, sides)


def made_of(kind: type[T], args: argparse.Namespace) -> T:
    """Return a dataclass whose fields have the values of the options with their names."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(args).items() if name in names})


def end_in_order() -> None:
    """Let SIGTERM raise SystemExit, so that a benchmark stops the programs that it started."""

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def in_turn(sides: Sequence[Side], rounds: int) -> list[Side]:
    """Measure all sides in turn, so that all see the same machine; write each round to stderr."""
    for number in range(rounds):
        for side in sides:
            side.rounds.append(dict(side.measure(number)))
            say(f"round {number + 1}, {side.name}: {_in_words(side.rounds[-1])}")
    return list(sides)


def _in_words(measured: Mapping[str, Any]) -> str:
    """Return the numbers of a round as a line; a list's is its median."""
    numbers = {name: statistics.median(one) if isinstance(one, list) and one else one for name, one in measured.items()}
    return ", ".join(f"{name} {one:.4g}" for name, one in numbers.items() if isinstance(one, int | float))


def say(line: str) -> None:
    """Write a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, the least and the most of the values as text; "" without values."""
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(title: str, sides: Iterable[Side], columns: Columns) -> Table:
    """Return a table with a row for each side; its first column is aligned to the left, the others to the right."""
    return table_of_rows(title, tuple(columns), ([cell(side) for cell in columns.values()] for side in sides))


def table_of_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table of rows, whose first column is aligned to the left and the others to the right."""
    shown = Table(title=title)
    for place, name in enumerate(columns):
        shown.add_column(name, justify="right" if place else "left")
    for row in rows:
        shown.add_row(*map(str, row))
    return shown


def name_of(side: Side) -> str:
    """Return a side's name: the first column of most tables."""
    return side.name


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
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
