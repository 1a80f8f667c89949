"""Run a job group on this machine: ``python -m scripts.run_local jobgroup.yaml --env MODEL_NAME=...``.

It starts the tasks' own ``run`` commands as processes, as SkyPilot would start them on nodes, and is for development,
demos and tests; anything larger is for SkyPilot.
"""

from __future__ import annotations

import re
import sys
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option
from typer.core import TyperCommand

from local_runner import engines, environment, nodes, own_code, run, spec, variables
from local_runner.commands import Launch
from local_runner.environment import Run
from local_runner.output import standard_output
from local_runner.plan import Plan
from services.core import machine
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError

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


class Command(TyperCommand):
    """The command line, which tells somebody who gives a setting as an option how to give it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        known = {"--help", *(option for one in self.params for option in (*one.opts, *one.secondary_opts))}
        for word, following in pairwise([*args, "-"]):
            name, _, value = word.partition("=")
            setting = variables.setting_like(name[2:].replace("-", "_")) if re.match(r"--[a-z]", name) else None
            if setting is not None and name not in known:
                value = value or ("VALUE" if following.startswith("-") else following)
                ctx.fail(f"No such option: {name}; give the setting as --env {setting}={value}")
        # A name alone takes the value of the environment, and only a job group's file may stand behind it.
        for word, name, value in zip(args, args[1:], [*args[2:], "-"], strict=False):
            if word == "--env" and "=" not in name and not value.startswith("-") and not Path(value).suffix:
                ctx.fail(f"{value} is no job group's file; write --env {name}={value} if it is a value")
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
    console = Console(file=standard_output())
    try:
        path = spec.find(path)
        group, overrides = _job_group(path, env or [], env_file or [], secret or [], num_nodes or [], small=small)
        with nodes.allocate(group, own_hosts=own_hosts) as addresses:
            planned = Run(
                group=group,
                run_id=run_id or overrides.environment.get("RUN_ID") or environment.new_run_id(group),
                shared_dir=shared_dir.resolve(),
                addresses=addresses,
                gpus=machine.visible_gpus(),
                mark=f"run-{uuid.uuid4().hex}",
            )
            _check_and_show(planned, console, dry_run=dry_run, commands=commands)
            if dry_run:
                raise typer.Exit
            secrets = list(overrides.secrets)
            in_files = spec.env_files(env_file or [])
            by_hand = Launch(path, env or (), env_file or (), in_files, secrets, num_nodes or (), small, shared_dir)
            launch = None if by_program else by_hand
            if run.show_if_finished(planned, launch, console):
                raise typer.Exit
            code = run.execute(planned, launch, console, live=console.is_terminal if live is None else live)
    except ConfigurationError as error:
        given = [assignment.partition("=")[0] for assignment in env or []]
        told = variables.as_keywords(str(error), given) if by_program else str(error)
        print(f"run_local: {told}", file=sys.stderr)
        raise typer.Exit(EXIT_CONFIGURATION) from error
    raise typer.Exit(code)


def _check_and_show(planned: Run, console: Console, *, dry_run: bool, commands: bool) -> None:
    """Check the run, and print its plan if this is a dry run, its commands if asked for, and its cautions."""
    environment.check_gpus(planned)
    variables.check_values(planned)
    engines.check(planned)
    own_code.check(planned)
    unchecked = own_code.unchecked_models(planned)
    plan = Plan(planned, is_dry_run=dry_run)
    if dry_run:
        plan.show(console, unchecked)
    if dry_run and commands:
        run.show_nodes(console, planned)
    for caution in plan.cautions():
        console.print(f"note: {caution}", style="yellow", soft_wrap=True, highlight=False)


def _job_group(
    path: Path, env: list[str], env_file: list[Path], secret: list[str], num_nodes: list[str], *, small: bool
) -> tuple[spec.JobGroup, spec.Overrides]:
    """Return the job group with the additions of the command line, and these additions."""
    from_files = spec.env_files(env_file)
    options, secrets = spec.assignments(env, "--env"), spec.assignments(secret, "--secret")
    overrides = spec.Overrides(from_files | options, secrets, spec.counts(num_nodes), 1 if small else None)
    group = spec.load(path, overrides)
    variables.check_names(group, options | secrets, from_files)
    environment.check_mounts(group)
    return group, overrides


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(main)
    app()
