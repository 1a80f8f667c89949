"""Runs a job group on this machine: ``python -m scripts.run_local jobgroup.yaml --env MODEL_NAME=...``.

It starts the tasks' own ``run`` commands as processes, as SkyPilot would start them on nodes, and is for development,
demos and tests; anything larger is SkyPilot's.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from local_runner import (
    directory,
    environment,
    gpus,
    health,
    nodes,
    processes,
    progress,
    spec,
    summary,
    variables,
    watchdog,
)
from local_runner.commands import Launch
from local_runner.environment import Run
from local_runner.output import standard_output
from local_runner.supervisor import Supervisor
from local_runner.view import View
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError

MEMORY_POLL_SECONDS = 1.0
STEP_POLL_SECONDS = 0.3


def main(
    path: Annotated[Path, typer.Argument(metavar="JOBGROUP", help="The job group's YAML.")] = Path("jobgroup.yaml"),
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every task; NAME alone takes it from here. Repeatable.")
    ] = None,
    env_file: Annotated[
        list[Path] | None, typer.Option(help="File of NAME=VALUE lines for every task; --env wins. Repeatable.")
    ] = None,
    secret: Annotated[list[str] | None, typer.Option(help="As --env, for secrets. Repeatable.")] = None,
    num_nodes: Annotated[
        list[str] | None, typer.Option(help="TASK=COUNT: how many nodes a task has. Repeatable.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Name of the run; that of a former run resumes it. Default: from the time.")
    ] = None,
    shared_dir: Annotated[
        Path, typer.Option(help="Directory that stands for the group's volume; runs are in its `runs/`.")
    ] = Path(),
    live: Annotated[
        bool | None, typer.Option("--live/--plain", help="A live view or plain lines. Default: live on a terminal.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the settings of all tasks, and show what would run and where."),
    ] = False,
    own_hosts: Annotated[
        bool | None,
        typer.Option(
            "--own-hosts/--shared-host",
            help="Whether each node has an address of its own or all share 127.0.0.1. Default: own where possible.",
        ),
    ] = None,
) -> None:
    """Runs the tasks of a job group as processes on this machine. The exit code is that of its primary task."""
    console = Console(file=standard_output())
    try:
        from_files = {name: value for file in env_file or [] for name, value in spec.env_file(file).items()}
        options, secrets = spec.assignments(env or [], "--env"), spec.assignments(secret or [], "--secret")
        overrides = spec.Overrides(from_files | options, secrets, spec.counts(num_nodes or []))
        group = spec.load(path, overrides)
        variables.check_names(group, options | secrets, from_files)
        environment.check_mounts(group)
        with nodes.allocate(group, own_hosts=own_hosts) as addresses:
            run = Run(
                group=group,
                run_id=run_id or overrides.environment.get("RUN_ID") or environment.new_run_id(group),
                shared_dir=shared_dir.resolve(),
                addresses=addresses,
                gpus=gpus.visible(),
                mark=f"run-{uuid.uuid4().hex}",
            )
            environment.check_gpus(run)
            variables.check_values(run)
            if dry_run:
                plan(console, run)
                raise typer.Exit
            launch = Launch(path, env or (), env_file or (), list(secrets), num_nodes or (), shared_dir)
            with _locked(run), watchdog.guard(run.mark):
                directory.record_nodes(run)
                exit_code = asyncio.run(_run(run, launch, console, console.is_terminal if live is None else live))
    except ConfigurationError as error:
        print(f"run_local: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CONFIGURATION) from error
    raise typer.Exit(exit_code)


def plan(console: Console, run: Run) -> None:
    """Prints the nodes of a run, with their addresses and commands."""
    table = Table("node", "address", "command", title=f"run {run.run_id} in {run.run_dir}", title_justify="left")
    for task in run.group.tasks:
        for rank, host in enumerate(run.addresses.hosts[task.name]):
            table.add_row(f"{task.name}-{rank}", host, task.run.strip().splitlines()[-1])
    console.print(table)


async def _run(run: Run, launch: Launch, console: Console, live: bool) -> int:
    since = time.time()
    meter = processes.MemoryMeter()
    with View(run, console, live=live) as view:
        supervisor = Supervisor(run, view.state)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, supervisor.stop, number)

        async def watch_steps() -> None:
            metrics = progress.MetricsFile(run.run_dir / "metrics.jsonl")
            while True:
                for step in metrics.new_steps():
                    view.step(step)
                await asyncio.sleep(STEP_POLL_SECONDS)

        async def watch_memory() -> None:
            while True:
                view.memory(await asyncio.to_thread(meter.measure))
                await asyncio.sleep(MEMORY_POLL_SECONDS)

        watchers = [
            asyncio.create_task(watcher)
            for watcher in (
                watch_steps(),
                watch_memory(),
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
        console.print(f"what the run took cannot be written down: {error}", soft_wrap=True)
    summary.show(console, run, launch, outcome, meter.peak, summary.trainer_summary(run, since))
    return outcome.exit_code


@contextlib.contextmanager
def _locked(run: Run) -> Iterator[None]:
    """Keeps a second runner out of the run directory."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory.locked(run.run_dir))
        except BlockingIOError as error:
            raise ConfigurationError(
                f"run {run.run_id} is already running in {run.run_dir}; end it or give another --run-id"
            ) from error
        yield


if __name__ == "__main__":
    typer.run(main)
