"""``grpo run``: a job group on this machine, its nodes as processes, with a view of what happens.

It starts the tasks' own ``run`` commands as processes, as SkyPilot would start them on nodes, and is for development,
demos and tests; anything larger is for SkyPilot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

import psutil
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text
from typer import Option

from local_runner import checks, nodes, processes, spec
from local_runner.launch import Launch, next_commands, shown_path, trainer_settings
from local_runner.nodes import LocalRun
from local_runner.plan import Plan
from local_runner.supervisor import Outcome, Supervisor
from local_runner.view import Json, View, present
from services.core import machine
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import write_json
from services.core.processes import stop_signals
from services.run_page.directory import OUTCOME, Nodes, Run

JobGroupPath = Annotated[
    Path, typer.Argument(metavar="JOBGROUP", help="The job group's YAML: a file here, or one that this project has.")
]
Env = Annotated[list[str] | None, Option(help="NAME=VALUE for every task; NAME alone takes it from here. Repeatable.")]
EnvFiles = Annotated[list[Path] | None, Option(help="File of NAME=VALUE lines for every task; --env wins. Repeatable.")]
Secrets = Annotated[list[str] | None, Option(help="As --env, for secrets. Repeatable.")]
NumNodes = Annotated[list[str] | None, Option(help="TASK=COUNT: how many nodes a task has. Repeatable.")]
Small = Annotated[bool, Option("--small", help="One node of each task, except those of --num-nodes.")]
RunId = Annotated[str | None, Option(help="Name of the run; that of a former run resumes it. Default: from the time.")]
SharedDir = Annotated[Path, Option(help="Directory that stands for the group's volume; runs are in its `runs/`.")]
DryRun = Annotated[
    bool, Option("--dry-run", help="Check settings, rows and all they name, show the plan, start nothing.")
]
OWN_HOSTS = "Whether each node has an address of its own or all share 127.0.0.1. Default: own where possible."
OwnHosts = Annotated[bool | None, Option("--own-hosts/--shared-host", help=OWN_HOSTS)]

POLL_SECONDS = 0.5
LAST_STEP = ("max_steps", "num_epochs", "batch_size", "target_accuracy")
"""The trainer's settings that decide after which step a run is over."""
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def main(
    path: JobGroupPath = Path("jobgroup.yaml"),
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    num_nodes: NumNodes = None,
    small: Small = False,
    run_id: RunId = None,
    shared_dir: SharedDir = Path(),
    dry_run: DryRun = False,
    own_hosts: OwnHosts = None,
) -> None:
    """Run the tasks of a job group as processes on this machine. The exit code is that of its primary task."""
    console = Console(file=standard_output())
    launch = Launch(spec.find(path), env or (), env_file or (), secret or (), num_nodes or (), small, shared_dir)
    with planned(launch, run_id, own_hosts=own_hosts) as run:
        check(run, console, dry_run=dry_run)
        if dry_run:
            return
        outcome = start(run, launch, console)
    raise typer.Exit(outcome.exit_code)


@contextlib.contextmanager
def planned(launch: Launch, run_id: str | None, *, own_hosts: bool | None = None) -> Iterator[LocalRun]:
    """Yield the run that a command line starts, whose addresses no other run gets within the context.

    Raises:
        ConfigurationError: the command line or the job group's file is wrong, or there are no free addresses.
    """
    group, overrides = launch.group()
    new = f"{group.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with nodes.allocate(group, own_hosts=own_hosts) as addresses:
        yield LocalRun(
            group=group,
            run_id=run_id or overrides.environment.get("RUN_ID") or new,
            shared_dir=launch.shared_dir.resolve(),
            addresses=addresses,
            gpus=machine.visible_gpus(),
            mark=f"run-{uuid.uuid4().hex}",
        )


def check(planned: LocalRun, console: Console, *, dry_run: bool = False) -> None:
    """Check the run, and print its plan if this is a dry run, and its cautions.

    Raises:
        ConfigurationError: a setting, a file, a function or the rows are wrong.
    """
    loaded = checks.load_all(planned)
    checks.check_before_rows(planned, loaded)
    plan = Plan(planned, loaded, is_dry_run=dry_run)
    if dry_run:
        plan.show(console)
    for caution in plan.cautions():
        console.print(Text(f"note: {caution}", "yellow"), soft_wrap=True)
    if dry_run:
        plan.check()


def start(run: LocalRun, launch: Launch, console: Console) -> Outcome:
    """Run the group to its end, or say that nothing is left to do; return the outcome.

    Signals that ask this process to end stop the run in order, and a second one at once.

    Args:
        run: the run, which ``check`` found right.
        launch: the command line that started it.
        console: where all output goes.

    Raises:
        ConfigurationError: the run directory cannot be written, or another runner works in it.
    """
    if (outcome := _if_finished(run, launch, console)) is not None:
        return outcome
    files, since = Run(run.run_dir), time.time()
    try:
        run.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{run.run_dir} cannot be made: {error}; give another --shared-dir") from error
    with files.locked(), processes.guard(run.mark):
        process = psutil.Process()
        files.record_nodes(Nodes(process.pid, process.create_time(), run.addresses.endpoints, mark=run.mark))
        launch.record(run.run_dir)
        outcome = asyncio.run(_supervise(run, console))
        try:
            write_json(run.run_dir / OUTCOME, asdict(outcome))
        except OSError as error:
            console.print(Text(f"the run's record cannot be written: {error}"), soft_wrap=True)
    summary = run.run_dir / "summary.json"
    is_new = summary.exists() and summary.stat().st_mtime >= since
    _show_end(run, launch, console, files.summary if is_new else {}, asdict(outcome))
    return outcome


def _if_finished(run: LocalRun, launch: Launch, console: Console) -> Outcome | None:
    """Print the result of a run that has succeeded and would take no further step, and return its outcome."""
    files = Run(run.run_dir)
    try:
        result, before, recorded = files.summary, files.settings(Task.TRAINER), files.outcome
    except (ValueError, OSError):  # the run's start says what cannot be read; the trainer replaces damaged files
        return None
    if result.get("status") != "succeeded" or not before or not (run.run_dir / "model").exists():
        return None
    settings = trainer_settings(run).model_dump(mode="json")
    if any(settings[name] != before.get(name) for name in LAST_STEP):
        return None
    _show_end(run, launch, console, result, recorded)
    hint = f"nothing is left to do: run {run.run_id} has ended after step {result['steps']}; to train on, raise "
    hint += "MAX_STEPS or NUM_EPOCHS"
    console.print(Text(hint, "yellow"), soft_wrap=not console.is_terminal)
    return Outcome(0, "nothing was left to do", 0.0, {})


def _show_end(run: LocalRun, launch: Launch, console: Console, summary: Json, outcome: Json) -> None:
    """Print the end of a run, and commands to copy for what may come next."""
    files, code = Run(run.run_dir), outcome.get("exit_code", 0)
    state = "failed" if outcome.get("failed") else "interrupted" if code else "succeeded"
    present(console, files, state, summary, outcome)
    size = decimal(files.usage()[0])
    console.print(f"directory  {shown_path(run.run_dir)}, disk space {size}", highlight=False, soft_wrap=True)
    for purpose, command in next_commands(run, launch, summary, code):
        # Each command is a line of its own and complete, to be copied, however narrow the terminal.
        console.print(Text(f"\n{purpose}:", "bold"))
        console.print(Text(f"  {command}"), soft_wrap=True)


async def _supervise(run: LocalRun, console: Console) -> Outcome:
    """Run the group to its end, which the signals of this process bring about, and show it."""
    view = View(run, console)
    supervisor = Supervisor(run, view.state)
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, supervisor.stop, number)
    watcher = asyncio.create_task(_watch(run, view))
    watcher.add_done_callback(view.lost_watcher)
    try:
        return await supervisor.run()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        machine.remove_memory(run.run_dir / "policy")  # that of nodes that were killed


async def _watch(run: LocalRun, view: View) -> None:
    """Show new steps, the nodes that are up and the trainer's status every POLL_SECONDS, until cancelled."""
    # Only now, when the nodes have been started: the HTTP client takes half of this process's imports.
    from services.run_page import components

    files, since = view.files, time.time()
    seen = len(files.steps())
    recorded: dict[str, str] = {}
    tokens = (task.environment.get("JOBGROUP_TOKEN") for task in run.group.tasks if task.name == Task.TRAINER)
    trainer = nodes.trainer_address(run.addresses.endpoints)
    async with components.questioner(next(tokens, None)) as http:

        async def ask(task: str, rank: int) -> None:
            address = nodes.health_address(run.addresses.endpoints, f"{task}-{rank}")
            if address is not None and await components.ask_state(http, address) == components.UP:
                view.up(task, rank)

        while True:
            steps = files.steps()
            view.failure(files.first_failure(since))  # which was before any of these steps
            # A restarted trainer may have cut the file back to its checkpoint.
            for row in steps[min(seen, len(steps)) :]:
                view.step(row)
            seen = len(steps)
            await asyncio.gather(*(ask(task.name, rank) for task in run.group.tasks for rank in range(task.num_nodes)))
            if trainer is not None:
                view.trainer(await components.ask_trainer(http, trainer))
            if view.states != recorded:
                recorded = view.states
                files.record_states(recorded)
            await asyncio.sleep(POLL_SECONDS)


class _DroppingFile(io.FileIO):
    """A file that drops data for which the disk has no room, or which nobody reads."""

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it; return the number of bytes as if they were written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return memoryview(data).nbytes


def standard_output() -> TextIO:
    """Return this process's standard output, with data dropped while the disk is full or once its reader is gone."""
    file = _DroppingFile(sys.stdout.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
