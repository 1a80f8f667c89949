"""A run of the local runner: its checks and plan, and its life with the view and the watchers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from local_runner import directory, health, processes, summary, watchdog
from local_runner.commands import Launch
from local_runner.environment import Run
from local_runner.progress import GrowingFile, new_steps
from local_runner.supervisor import Supervisor
from local_runner.view import View
from services.core.errors import ConfigurationError

MEMORY_POLL_SECONDS = 1.0
STEP_POLL_SECONDS = 0.3


def show_plan(console: Console, run: Run) -> None:
    """Print the nodes of a run, with their addresses and commands."""
    table = Table("node", "address", "command", title=f"run {run.run_id} in {run.run_dir}", title_justify="left")
    for task in run.group.tasks:
        for rank, host in enumerate(run.addresses.hosts[task.name]):
            table.add_row(f"{task.name}-{rank}", host, task.run.strip().splitlines()[-1])
    console.print(table)


def execute(run: Run, launch: Launch, console: Console, *, live: bool) -> int:
    """Run the group to its end, show what happens, and return the exit code.

    Args:
        run: the run.
        launch: the command line, for the commands that are printed at the end.
        console: where all output goes.
        live: whether a live view stands below the lines.

    Raises:
        ConfigurationError: the run directory cannot be written, or another runner works in it.
    """
    with _locked(run), watchdog.guard(run.mark):
        directory.record_nodes(run)
        return asyncio.run(_execute(run, launch, console, live=live))


async def _execute(run: Run, launch: Launch, console: Console, *, live: bool) -> int:
    since = time.time()
    meter = processes.MemoryMeter()
    with View(run, console, live=live) as view:
        supervisor = Supervisor(run, view.state)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop, number)
        watchers = [
            asyncio.create_task(watcher)
            for watcher in (
                _watch_steps(run, view),
                _watch_memory(meter, view),
                health.watch(run, view.health),
                health.watch_trainer(run, view.trainer),
            )
        ]
        for watcher in watchers:
            watcher.add_done_callback(view.lost_watcher)
        try:
            outcome = await supervisor.run()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
    try:
        summary.record(run, outcome, meter)
    except OSError as error:
        console.print(f"the run's record cannot be written: {error}", soft_wrap=True)
    summary.show(console, run, launch, outcome, meter.peak, summary.trainer_summary(run, since))
    return outcome.exit_code


async def _watch_steps(run: Run, view: View) -> None:
    metrics = GrowingFile(run.run_dir / "metrics.jsonl", from_end=True)
    while True:
        for step in new_steps(metrics):
            view.step(step)
        await asyncio.sleep(STEP_POLL_SECONDS)


async def _watch_memory(meter: processes.MemoryMeter, view: View) -> None:
    while True:
        view.memory(await asyncio.to_thread(meter.measure))
        await asyncio.sleep(MEMORY_POLL_SECONDS)


@contextlib.contextmanager
def _locked(run: Run) -> Iterator[None]:
    """Keep a second runner out of the run directory."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory.locked(run.run_dir))
        except BlockingIOError as error:
            raise ConfigurationError(
                f"run {run.run_id} is already running in {run.run_dir}; end it or give another --run-id"
            ) from error
        yield
