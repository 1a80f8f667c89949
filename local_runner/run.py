"""``grpo run``: a job group on this machine, its nodes as processes, with a view of what happens.

It starts the tasks' own ``run`` commands as processes, as SkyPilot would start them on nodes, and is for development,
demos and tests; anything larger is for SkyPilot.
"""

from __future__ import annotations

import asyncio
import errno
import io
import re
import signal
import sys
import time
import uuid
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option
from typer.core import TyperCommand

from local_runner import checks, directory, nodes, processes, spec, summary
from local_runner.fork import record_launch
from local_runner.nodes import Run, gpus_of
from local_runner.plan import Plan
from local_runner.progress import GrowingFile, new_steps
from local_runner.summary import Launch, trainer_settings
from local_runner.supervisor import Supervisor
from local_runner.view import View
from services.core import machine
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_object, write_json
from services.core.processes import stop_signals
from services.run_page.directory import first_failure

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
Live = Annotated[bool | None, Option("--live/--plain", help="A live view or plain lines. Default: live on a terminal.")]
DryRun = Annotated[
    bool,
    Option("--dry-run", help="Check the settings, the rows and all else that they name, show the plan, start nothing."),
]
Commands = Annotated[bool, Option("--commands", help="With --dry-run: also show each node's address and command.")]
ByProgram = Annotated[
    bool,
    Option(
        "--by-program",
        hidden=True,
        help="For `train`, which starts this program: stop when standard input ends, print no commands at the end, and "
        "write the names of settings as keywords.",
    ),
]
OwnHosts = Annotated[
    bool | None,
    Option(
        "--own-hosts/--shared-host",
        help="Whether each node has an address of its own or all share 127.0.0.1. Default: own where possible.",
    ),
]

POLL_SECONDS = 0.5
LAST_STEP = ("max_steps", "num_epochs", "batch_size", "target_accuracy")
"""The trainer's settings that decide after which step a run is over."""
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Command(TyperCommand):
    """The command line, which refuses a setting given as an option with the right way to give it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        options = {"--help", *(option for one in self.params for option in (*one.opts, *one.secondary_opts))}
        for word, following in pairwise([*args, "-"]):
            name, _, value = word.partition("=")
            if name == "--resume":
                ctx.fail("No such option: --resume; the same command with --run-id NAME resumes the run NAME")
            setting = checks.setting_like(name[2:].replace("-", "_")) if re.match(r"--[a-z]", name) else None
            if setting is not None and name not in options:
                value = value or ("VALUE" if following.startswith("-") else following)
                ctx.fail(f"No such option: {name}; give the setting as --env {setting}={value}")
        # A name alone takes the value of the environment, and only a job group's file may stand behind it.
        for word, name, value in zip(args, args[1:], [*args[2:], "-"], strict=False):
            if word == "--env" and "=" not in name and not value.startswith("-") and not Path(value).suffix:
                ctx.fail(f"{value} is not a job group's file; write --env {name}={value} if it is a value")
        return super().parse_args(ctx, args)


def main(
    path: JobGroupPath = Path("jobgroup.yaml"),
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    num_nodes: NumNodes = None,
    small: Small = False,
    run_id: RunId = None,
    shared_dir: SharedDir = Path(),
    live: Live = None,
    dry_run: DryRun = False,
    commands: Commands = False,
    own_hosts: OwnHosts = None,
    by_program: ByProgram = False,
) -> None:
    """Run the tasks of a job group as processes on this machine. The exit code is that of its primary task."""
    console = Console(file=_standard_output())
    try:
        path = spec.find(path)
        group, overrides, in_files = read_group(
            path, env or [], env_file or [], secret or [], num_nodes or [], small=small
        )
        with nodes.allocate(group, own_hosts=own_hosts) as addresses:
            planned = Run(
                group=group,
                run_id=run_id or overrides.environment.get("RUN_ID") or nodes.new_run_id(group),
                shared_dir=shared_dir.resolve(),
                addresses=addresses,
                gpus=machine.visible_gpus(),
                mark=f"run-{uuid.uuid4().hex}",
            )
            _check_and_show(planned, console, dry_run=dry_run, commands=commands)
            if dry_run:
                return
            secrets = list(overrides.secrets)
            by_hand = Launch(path, env or (), env_file or (), in_files, secrets, num_nodes or (), small, shared_dir)
            launch = None if by_program else by_hand
            if _show_if_finished(planned, launch, console):
                return
            code = _execute(planned, launch, by_hand, console, live=console.is_terminal if live is None else live)
    except ConfigurationError as error:
        if not by_program:
            raise
        names = [assignment.partition("=")[0] for assignment in env or []]
        raise ConfigurationError(checks.as_keywords(str(error), names)) from error
    raise typer.Exit(code)


def _check_and_show(planned: Run, console: Console, *, dry_run: bool, commands: bool) -> None:
    """Check the run, and print its plan if this is a dry run, its commands if asked for, and its cautions."""
    loaded = checks.load_all(planned)
    *_, unchecked = [part() for part in checks.before_rows(planned, loaded).values()]
    plan = Plan(planned, loaded, is_dry_run=dry_run)
    if dry_run:
        plan.show(console, unchecked or [])
    if dry_run and commands:
        _show_nodes(console, planned)
    for caution in plan.cautions():
        console.print(Text(f"note: {caution}", "yellow"), soft_wrap=True)
    if dry_run:
        plan.check()


def read_group(
    path: Path, env: list[str], env_file: list[Path], secret: list[str], num_nodes: list[str], *, small: bool
) -> tuple[spec.JobGroup, spec.Overrides, dict[str, str]]:
    """Return the job group with the additions of the command line, these additions, and the variables of the files."""
    from_files = spec.env_files(env_file)
    options, secrets = spec.assignments(env, "--env"), spec.assignments(secret, "--secret")
    overrides = spec.Overrides(from_files | options, secrets, spec.counts(num_nodes), 1 if small else None)
    group = spec.load(path, overrides)
    checks.check_names(group, options | secrets, from_files)
    nodes.check_mounts(group)
    return group, overrides, from_files


def _show_nodes(console: Console, run: Run) -> None:
    """Print the nodes of a run, with their addresses, GPUs and commands."""
    title = f"run {run.run_id} in {run.run_dir}"
    table = Table("node", "address", "GPUs", "command", title=title, title_justify="left")
    for task in run.group.tasks:
        for rank, host in enumerate(run.addresses.hosts[task.name]):
            gpus = ", ".join(gpus_of(run, task, rank)) or "none"
            command = task.run.strip().splitlines()[-1].partition(" || ")[0]
            table.add_row(f"{task.name}-{rank}", host, gpus, Text(command))
    console.print(table)


def _show_if_finished(run: Run, launch: Launch | None, console: Console) -> bool:
    """Print the result of a run that has succeeded and would take no further step; return whether it is such a run."""
    try:
        result = read_object(run.run_dir / "summary.json")
        components = read_object(run.run_dir / "config.json").get("components", {})
    except (ValueError, OSError):  # the run's start says what cannot be read; the trainer replaces damaged files
        return False
    before = components.get(Task.TRAINER.value)
    if result.get("status") != "succeeded" or before is None or not (run.run_dir / "model").exists():
        return False
    settings = trainer_settings(run).model_dump(mode="json")
    if any(settings[name] != before["settings"].get(name) for name in LAST_STEP):
        return False
    summary.show(console, run, launch, read_object(run.run_dir / directory.OUTCOME), result)
    hint = f"nothing is left to do: run {run.run_id} has ended after step {result['steps']}; to train on, raise "
    hint += "MAX_STEPS or NUM_EPOCHS" if launch is not None else "max_steps or num_epochs"
    console.print(Text(hint, "yellow"), soft_wrap=not console.is_terminal)
    return True


def _execute(run: Run, launch: Launch | None, recorded: Launch, console: Console, *, live: bool) -> int:
    """Run the group to its end, show what happens, and return the exit code.

    Args:
        run: the run.
        launch: the command line, for the commands that are printed at the end. None: a program started the run, which
            ends it by closing this process's standard input.
        recorded: the command line for launch.json.
        console: where all output goes.
        live: whether a live view stands below the lines.

    Raises:
        ConfigurationError: the run directory cannot be written, or another runner works in it.
    """
    try:
        run.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{run.run_dir} cannot be made: {error}; give another --shared-dir") from error
    with directory.locked(run.run_dir), processes.guard(run.mark):
        directory.record_nodes(run)
        record_launch(run.run_dir, recorded)
        try:
            return asyncio.run(_run_with_view(run, launch, console, live=live))
        finally:
            machine.remove_memory(run.run_dir / "policy")  # that of nodes that were killed


async def _run_with_view(run: Run, launch: Launch | None, console: Console, *, live: bool) -> int:
    since = time.time()
    with View(run, console, live=live) as view:
        supervisor = Supervisor(run, view.state)
        for number in stop_signals():
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
        write_json(run.run_dir / directory.OUTCOME, record)
    except OSError as error:
        console.print(Text(f"the run's record cannot be written: {error}"), soft_wrap=True)
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


def _standard_output() -> TextIO:
    """Return this process's standard output, with data dropped while the disk is full or once its reader is gone."""
    file = _DroppingFile(sys.stdout.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
