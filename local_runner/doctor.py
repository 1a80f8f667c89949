"""``grpo doctor``: what this machine can do, as one table."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from typer import Option

from services.core import machine
from services.core.errors import ConfigurationError
from services.core.toolchain import missing_tools
from services.engines.sglang_command import check_installed
from services.sandbox.backends import AUTOMATIC, Interpreter
from services.sandbox.probe import attack

GOOD, BAD, NOTE = "[green]yes[/]", "[red]no[/]", "-"

Row = tuple[str, str, str]
"""A line of the table: what it is about, GOOD, BAD or NOTE, and the facts."""


def main(shared_dir: Annotated[Path, Option(help="Directory whose disk is shown.")] = Path()) -> None:
    """Show what this machine can do; `grpo run --dry-run` says whether a job group can run on it."""
    console = Console()
    table = Table("", "", "facts", title="this machine", title_justify="left")
    for subject, state, facts in (*_of_machine(shared_dir.resolve()), *_of_sandboxes(), *_of_harnesses()):
        table.add_row(Text(subject), state, Text(facts))
    console.print(table)


def _of_machine(shared_dir: Path) -> Iterator[Row]:
    yield "system", NOTE, f"{platform.platform()}, Python {platform.python_version()}, {machine.cores()} cores"
    yield "memory", NOTE, decimal(machine.host_memory())
    for subject, path in (("shared memory", Path("/dev/shm")), ("disk", shared_dir)):
        if path.is_dir():
            yield subject, NOTE, f"{decimal(shutil.disk_usage(path).free)} free in {path}"
    gpus, memory = machine.visible_gpus(), machine.gpu_memory()
    driver = machine.driver_version()
    if gpus:
        yield "GPUs", GOOD, f"{len(gpus)} of {decimal(memory or 0)} at least, driver {driver}"
    else:
        yield "GPUs", NOTE, f"none{f', although there is driver {driver}' if driver else ''}"
    yield from _of_engines(has_gpus=bool(gpus))


def _of_engines(*, has_gpus: bool) -> Iterator[Row]:
    """Yield the engines that are installed, and on a machine with GPUs what trainer and SGLang lack to compile."""
    engines = {"SGLang": ["sglang"], "the embedded engine": ["torch", "sglang_router"]}
    installed = [name for name, modules in engines.items() if all(map(find_spec, modules))]
    python, problem = os.environ.get("SGLANG_PYTHON"), ""
    if python:
        try:
            check_installed("sglang", "sglang", python)
            installed.append(python)
        except ConfigurationError as error:
            problem = str(error)
    yield "engine", BAD if problem or not installed else GOOD, problem or ", ".join(installed) or "none"
    interpreters = [("the trainer's kernels", sys.executable, False)]
    if not problem and (python or "SGLang" in installed):
        interpreters.append(("SGLang's kernels", python or sys.executable, True))
    for subject, interpreter, for_engine in interpreters if has_gpus else ():
        missing = missing_tools(interpreter, for_engine=for_engine)
        lacks = "; ".join(f"{tool}: {remedy}" for tool, remedy in missing.items())
        yield subject, BAD if missing else GOOD, f"missing {lacks}" if missing else "all tools that compile them"


def _of_sandboxes() -> Iterator[Row]:
    interpreter = Interpreter.find(os.environ.get("SANDBOX_PYTHON") or sys.executable)
    for backend in AUTOMATIC:
        problems = asyncio.run(attack(backend, interpreter, writes=True))
        yield f"sandbox {backend}", BAD if problems else GOOD, ", ".join(problems) or "every attack fails"


def _of_harnesses() -> Iterator[Row]:
    from services.harnesses import PRESETS, install_command

    for name, harness in PRESETS.items():
        is_there = harness.is_installed
        facts = harness.version if is_there else f"not installed; run: {install_command(harness)}"
        yield f"preset {name}", GOOD if is_there else NOTE, facts
