"""``grpo set``: settings that change while a run runs, from a step on; docs/guides/changing.md has examples."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from local_runner.checks import tasks_by_variable
from local_runner.spec import assignments, nearest
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_object
from services.run_page.directory import MAYBE, RUNNING, RUNS, Run, find_run
from trainer.config.changes import CHANGEABLE, Request, changed, changes_of, write_request

POLL_SECONDS = 0.2


def main(
    run: Annotated[str, typer.Argument(help="Id or directory of the run.")],
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="Settings and their new values.")],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for the run's next step.")] = 3600.0,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = RUNS,
) -> None:
    """Change settings of a run that runs, from its next step on.

    The request stays when this command ends before that step.
    """
    run_dir = find_run(run, below).path.resolve()
    _check_runs(run_dir)
    new = {name.lower(): value for name, value in assignments(values, "grpo set").items()}
    after = _check(run_dir, new)
    step = _wait(run_dir, write_request(run_dir, after), time.monotonic() + timeout, timeout)
    print(f"{', '.join(f'{name.upper()}={value}' for name, value in after.items())} from step {step} on")


def _check_runs(run_dir: Path) -> None:
    if (state := Run(run_dir).state) not in (RUNNING, MAYBE):
        raise ConfigurationError(
            f"{run_dir} does not run ({state}); start it again with --env NAME=VALUE, or fork it with `grpo fork`"
        )


def _check(run_dir: Path, new: dict[str, str]) -> dict[str, JsonValue]:
    """Return the new values by name, as the trainer's settings have them.

    Raises:
        ConfigurationError: a setting is unknown, of another component, or cannot change; or a value is not allowed.
    """
    readers = tasks_by_variable()
    for name in (name.upper() for name in new):
        tasks = readers.get(name)
        if tasks is None:
            near = nearest(name, [one.upper() for one in CHANGEABLE]) or nearest(name, readers)
            raise ConfigurationError(f"{name} is read by no component{near}")
        if Task.TRAINER not in tasks:
            raise ConfigurationError(
                f"{name} is a setting of {' and '.join(tasks)} alone, which read it when they start; end the run and "
                f"start it again with --env {name}=VALUE, or fork it"
            )
    record = read_object(run_dir / "config.json").get("components", {}).get(Task.TRAINER)
    if record is None:
        raise ConfigurationError(
            f"{run_dir} has no config.json yet: its trainer has not started; try again when it has"
        )
    settings = {name: record["settings"][name] for name in record["changed"] if name != "jobgroup_token"}
    return changed(run_dir, settings, new).model_dump(mode="json", include={*new})


def _wait(run_dir: Path, request: Path, deadline: float, timeout: float) -> int:
    """Return the first step for which a request holds.

    Raises:
        ConfigurationError: the trainer refused it, the run ended before, or no step began before the deadline.
    """
    while True:
        is_over = Run(run_dir).state not in (RUNNING, MAYBE)
        for change in changes_of(run_dir):
            if change.request == request.stem:
                return change.step
        if request.exists() and (refusal := Request.model_validate_json(request.read_bytes()).refusal):
            request.unlink()
            raise ConfigurationError(refusal)
        if is_over:
            request.unlink(missing_ok=True)
            raise ConfigurationError(f"{run_dir} ended before another step began; nothing has changed")
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"{run_dir} began no step within {timeout:g} s; {request} stays, and holds from its next step on. "
                "Remove the file to withdraw it"
            )
        time.sleep(POLL_SECONDS)
