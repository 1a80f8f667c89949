"""A run of the local runner: its nodes, and its life with the view and the watchers."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner import directory, nodes, summary, watchdog
from local_runner.commands import Launch, trainer_settings
from local_runner.environment import Run, gpus_of
from local_runner.progress import GrowingFile, new_steps
from local_runner.supervisor import Supervisor
from local_runner.view import View
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.run_page.directory import first_failure, read_object

POLL_SECONDS = 0.5
LAST_STEP = ("max_steps", "num_epochs", "batch_size", "target_accuracy")
"""The trainer's settings that decide after which step a run is over."""


def show_nodes(console: Console, run: Run) -> None:
    """Print the nodes of a run, with their addresses, GPUs and commands."""
    title = f"run {run.run_id} in {run.run_dir}"
    table = Table("node", "address", "GPUs", "command", title=title, title_justify="left")
    for task in run.group.tasks:
        for rank, host in enumerate(run.addresses.hosts[task.name]):
            gpus = ", ".join(gpus_of(run, task, rank)) or "none"
            table.add_row(f"{task.name}-{rank}", host, gpus, task.run.strip().splitlines()[-1].partition(" || ")[0])
    console.print(table)


def show_if_finished(run: Run, launch: Launch | None, console: Console) -> bool:
    """Print the result of a run that has succeeded and would take no further step; return whether it is such a run."""
    try:
        result = read_object(run.run_dir / "summary.json")
        components = read_object(run.run_dir / "config.json").get("components", {})
    except (ValueError, OSError):  # the run's start says what cannot be read; the trainer writes damaged files anew
        return False
    before = components.get(Task.TRAINER.value)
    if result.get("status") != "succeeded" or before is None or not (run.run_dir / "model").exists():
        return False
    settings = trainer_settings(run).model_dump(mode="json")
    if any(settings[name] != before["settings"].get(name) for name in LAST_STEP):
        return False
    summary.show(console, run, launch, read_object(run.run_dir / directory.OUTCOME), result)
    told = f"nothing is left to do: run {run.run_id} has ended after step {result['steps']}; to train on, raise "
    told += "MAX_STEPS or NUM_EPOCHS" if launch is not None else "max_steps or num_epochs"
    console.print(Text(told, "yellow"), soft_wrap=not console.is_terminal)
    return True


def execute(run: Run, launch: Launch | None, console: Console, *, live: bool) -> int:
    """Run the group to its end, show what happens, and return the exit code.

    Args:
        run: the run.
        launch: the command line, for the commands that are printed at the end. None: a program started the run, which
            ends it by closing this process's standard input.
        console: where all output goes.
        live: whether a live view stands below the lines.

    Raises:
        ConfigurationError: the run directory cannot be written, or another runner works in it.
    """
    try:
        run.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{run.run_dir} cannot be made: {error}; give another --shared-dir") from error
    with directory.locked(run.run_dir), watchdog.guard(run.mark):
        directory.record_nodes(run)
        return asyncio.run(_execute(run, launch, console, live=live))


async def _execute(run: Run, launch: Launch | None, console: Console, *, live: bool) -> int:
    since = time.time()
    with View(run, console, live=live) as view:
        supervisor = Supervisor(run, view.state)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop, number)
        if launch is None:
            _stop_at_end_of_input(supervisor)
        watcher = asyncio.create_task(_watch(run, view))
        watcher.add_done_callback(view.lost_watcher)
        try:
            outcome = await supervisor.run()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    record = asdict(outcome)
    try:
        directory.write_object(run.run_dir / directory.OUTCOME, record)
    except OSError as error:
        console.print(f"the run's record cannot be written: {error}", soft_wrap=True)
    summary.show(console, run, launch, record, summary.trainer_summary(run, since))
    return outcome.exit_code


def _stop_at_end_of_input(supervisor: Supervisor) -> None:
    """Stop the run as Ctrl-C does when standard input, to which nothing is written, ends."""
    loop, standard_input = asyncio.get_running_loop(), sys.stdin.fileno()

    def stop() -> None:
        loop.remove_reader(standard_input)
        supervisor.stop(signal.SIGINT)

    loop.add_reader(standard_input, stop)


async def _watch(run: Run, view: View) -> None:
    """Show new steps, the nodes that are up and the trainer's status every POLL_SECONDS, until cancelled."""
    # Only now, when the nodes have been started: the HTTP client takes half of this process's imports.
    from local_runner import health

    metrics = GrowingFile(run.run_dir / "metrics.jsonl", from_end=True)
    since = time.time()
    recorded: dict[str, str] = {}
    tokens = (task.environment.get("JOBGROUP_TOKEN") for task in run.group.tasks if task.name == Task.TRAINER)
    trainer = nodes.trainer_address(run.addresses.endpoints)
    async with health.client(next(tokens, None)) as http:

        async def ask(task: str, rank: int) -> None:
            address = nodes.health_address(run.addresses.endpoints, f"{task}-{rank}")
            if address is not None and await health.state(http, address) == health.UP:
                view.up(task, rank)

        while True:
            steps = new_steps(metrics)
            view.failure(first_failure(run.run_dir, since))  # which was before any of these steps
            for step in steps:
                view.step(step)
            await asyncio.gather(*(ask(task.name, rank) for task in run.group.tasks for rank in range(task.num_nodes)))
            if trainer is not None:
                view.trainer(await health.trainer_status(http, trainer))
            if view.states != recorded:
                recorded = view.states
                directory.record_states(run, recorded)
            await asyncio.sleep(POLL_SECONDS)
