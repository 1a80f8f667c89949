"""``grpo tasks check``: attempts every task of a directory, before a run trains on those that pass."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.core import logs, machine
from services.core.errors import EXIT_FAILED, DependencyLostError
from services.data_server.harbor import TaskRefusedError
from services.data_server.settings import HARBOR
from services.data_server.task_sets import checks_file, read_checks, read_tasks
from services.environment_server.harbor import HarborTasks, load
from services.environment_server.settings import EnvironmentSettings
from services.environment_server.task_checks import Check, check_task, conditions
from services.reward_server.settings import RewardSettings


class Action(StrEnum):
    """The commands on tasks."""

    CHECK = "check"


def main(
    action: Annotated[Action, typer.Argument(help="`check`: attempt every task.")],
    directory: Annotated[Path, typer.Argument(help="Tasks in Harbor's format, or a file with a directory a line.")],
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at once; default: a task for each core.")] = machine.cores(),
    again: Annotated[bool, typer.Option("--again", help="Attempt also the tasks that have a verdict.")] = False,
) -> None:
    """Attempt tasks by their solutions and by doing nothing; a run trains on those that pass."""
    logs.configure("tasks", "error")
    dataset = f"{HARBOR}{directory}"
    checks = asyncio.run(_check(dataset, jobs, again=again))
    _, refused = read_tasks(dataset)
    _print(checks, refused, dataset)
    if refused or not all(check.passes for check in checks):
        raise typer.Exit(EXIT_FAILED)


async def _check(dataset: str, jobs: int, *, again: bool) -> list[Check]:
    """Return a verdict on each task that can be done; those that are new are written as they are found."""
    settings = EnvironmentSettings.load()
    rewards = RewardSettings.load().without_sources(reward_fn="code", accuracy_fn=None)
    tasks = await load([dataset], settings, rewards.model_copy(update={"reward_workers": jobs}))
    if images := {task.image for task in tasks.tasks.values() if tasks.root_of(task.image) is None}:
        print(f"boxes have this machine's programs, not those of {', '.join(sorted(images))} (SANDBOX_TREES)")
    known = {} if again else read_checks(dataset)
    checks = {}
    for number, task in tasks.tasks.items():
        record = known.get(task.digest)
        if record is not None and record["limits"] == conditions(tasks, task):
            checks[number] = Check(**record)
    try:
        async with asyncio.TaskGroup() as group:
            for number in tasks.tasks.keys() - checks.keys():
                group.create_task(_attempt(tasks, number, dataset, checks))
    finally:
        await tasks.end()
    return [checks[number] for number in sorted(checks, key=lambda number: checks[number].task)]


async def _attempt(tasks: HarborTasks, number: int, dataset: str, checks: dict[int, Check]) -> None:
    try:
        check = checks[number] = await check_task(tasks, tasks.tasks[number])
    except DependencyLostError as error:
        # Not written: the next command attempts it again.
        task = tasks.tasks[number]
        checks[number] = Check(task.name, task.digest, "", reason="its box was lost", detail=str(error))
        return
    with checks_file(dataset).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(check)) + "\n")


def _print(checks: list[Check], refused: dict[str, TaskRefusedError], dataset: str) -> None:
    console = Console()
    table = Table("task", "solution", "nothing", "passes", "why not, weaknesses, notes", title_justify="left")
    for check in checks:
        said = [check.reason, check.detail, *(f"weak: {one}" for one in check.weaknesses), *check.notes]
        numbers = (" ".join("-" if one is None else f"{one:g}" for one in of) for of in (check.oracle, check.nothing))
        verdict = "[green]yes[/]" if check.passes else "[red]no[/]"
        table.add_row(Text(check.task), *numbers, verdict, Text("; ".join(filter(None, said))))
    for name, error in refused.items():
        table.add_row(Text(name), "", "", "[red]no[/]", Text(f"cannot be done: {error}"))
    console.print(table)
    counts = Counter("pass" if check.passes else check.reason for check in checks) + Counter(
        error.kind for error in refused.values()
    )
    console.print(", ".join(f"{count} {reason}" for reason, count in counts.items()), highlight=False)
    console.print(f"verdicts are in {checks_file(dataset)}", highlight=False, soft_wrap=True)
