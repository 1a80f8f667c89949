"""The commands that a person may run next when a run has ended, complete, to be copied."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from local_runner.environment import Run, node_environment
from local_runner.settings_classes import READERS
from local_runner.variables import load_settings
from scripts.grpo import COMMANDS
from services.core.endpoints import Task
from services.core.errors import EXIT_CONFIGURATION
from services.core.settings import Settings
from services.run_page.records import parse

if TYPE_CHECKING:
    from trainer.config import TrainerSettings

_EVALUATED_AS: dict[str, Task] = {
    "evaluate": Task.TRAINER,
    **{task: task for task in (Task.DATA_SERVER, Task.REWARD_SERVER, Task.ROLLOUT_SERVER)},
}
"""The task of a run whose variables an evaluation takes over, by the first task of the settings' reader."""
_OWN = {*Settings.model_fields, "model_name"}
"""The settings of an evaluation that are never those of a run."""


@dataclass(frozen=True)
class Launch:
    """The command line that started a run, without its ``--run-id``."""

    job_group: Path
    env: Sequence[str] = ()
    env_files: Sequence[Path] = ()
    in_files: Mapping[str, str] = field(default_factory=dict)
    """The variables of these files."""
    secrets: Sequence[str] = ()
    """The names alone, because the values must not appear on a terminal."""
    num_nodes: Sequence[str] = ()
    small: bool = False
    shared_dir: Path = Path()

    def again(self, run_id: str, *env: str) -> list[str]:
        """Return the command that continues the run, with ``env`` in place of earlier values of its variables."""
        replaced = {assignment.partition("=")[0] for assignment in env}
        kept = [assignment for assignment in self.env if assignment.partition("=")[0] not in replaced]
        options = [*_repeated("--env-file", self.env_files), *_repeated("--env", [*kept, *env])]
        options += _repeated("--secret", self.secrets)
        options += _repeated("--num-nodes", self.num_nodes)
        options += ["--small"] if self.small else []
        if self.shared_dir != Path():
            options += ["--shared-dir", str(self.shared_dir)]
        return [*module("scripts.run_local"), str(self.job_group), *options, "--run-id", run_id]


def next_commands(run: Run, launch: Launch, summary: dict[str, Any], exit_code: int) -> list[tuple[str, str]]:
    """Return purpose and command of everything that can be done with an ended run.

    Args:
        run: the run.
        launch: the command line that started it.
        summary: the trainer's summary.json; empty if the trainer has written none.
        exit_code: the run's exit code.
    """
    directory = shown_path(run.run_dir)
    has_checkpoint = any((run.run_dir / "checkpoints").glob("*"))
    corrected = ", after the correction" if exit_code == EXIT_CONFIGURATION else ""
    commands = [("look at it", shlex.join([*module("scripts.view"), directory]))]
    if summary.get("status") == "succeeded" and (run.run_dir / "model").exists():
        model = f"{directory}/model"
        settings = trainer_settings(run)
        # Its episodes need the run's environment-servers, which only a run starts, or a gateway's APIs.
        if settings.rollout != "environment" and not _calls_by_other_apis(run):
            evaluate = [*module("scripts.evaluate"), "--model", model, *_evaluated_as(run, launch)]
            commands.append(("evaluate", shlex.join(evaluate)))
        commands.append(
            ("chat with it, beside the model it began as", shlex.join([*module("scripts.chat"), directory]))
        )
        if has_checkpoint:
            commands.append(
                ("train on", shlex.join(launch.again(run.run_id, *_twice(settings, int(summary["steps"])))))
            )
    elif has_checkpoint:
        commands.append((f"resume{corrected}", shlex.join(launch.again(run.run_id))))
    elif any(task.name == Task.TRAINER for task in run.group.tasks):
        commands.append((f"start again{corrected}", shlex.join(launch.again(run.run_id))))
    elsewhere = [] if launch.shared_dir == Path() else ["--runs", shown_path(run.run_dir.parent)]
    commands.append(("remove it", shlex.join([*module("scripts.clean"), directory])))
    commands.append(("list runs by size, and remove some", shlex.join([*module("scripts.clean"), *elsewhere])))
    return commands


def _calls_by_other_apis(run: Run) -> bool:
    """Return whether the run's agent called the model by an API that evaluations lack, by its first episode."""
    samples = run.run_dir / "samples.jsonl"
    if not samples.exists():
        return False
    with samples.open("rb") as file:
        return bool((parse(file.readline()) or {}).get("other_api_calls"))


def trainer_settings(run: Run) -> TrainerSettings:
    """Return the settings of the run's trainer."""
    [trainer] = [task for task in run.group.tasks if task.name == Task.TRAINER]
    [reader] = [reader for reader in READERS if Task.TRAINER in reader.tasks]
    return cast("TrainerSettings", load_settings(run, trainer, reader.settings_class()))


def _evaluated_as(run: Run, launch: Launch) -> list[str]:
    """Return the options that give an evaluation the run's settings, as far as it reads them.

    The --env-file options stay as they are. --env gives what the command line or the job group's own file has in place
    of their values and of the defaults.
    """
    given = {assignment.partition("=")[0]: assignment for assignment in launch.env}
    settings = {name for reader in READERS for name in reader.settings_class().model_fields}
    env = {name: assignment for name, assignment in given.items() if name.lower() not in settings}
    tasks = {task.name: task for task in run.group.tasks}
    for reader in READERS:
        task = tasks.get(_EVALUATED_AS.get(reader.tasks[0], ""))
        if task is None:
            continue
        variables = node_environment(run, task, 0)
        for setting, info in reader.settings_class().model_fields.items():
            name = setting.upper()
            if setting in _OWN or name in launch.secrets or name not in task.environment:
                continue
            if variables[name] != launch.in_files.get(name, str(info.default)):
                env[name] = given.get(name, f"{name}={variables[name]}")
    return [*_repeated("--env-file", launch.env_files), *_repeated("--env", list(env.values()))]


def _twice(settings: TrainerSettings, steps: int) -> list[str]:
    """Return the variables with which a run of ``steps`` steps continues to twice as many, with prompts for all."""
    limit = [f"MAX_STEPS={2 * steps}"] if settings.max_steps else []
    return [*limit, f"NUM_EPOCHS={2 * settings.num_epochs}"]


def shown_path(path: Path) -> str:
    """Return ``path`` relative to the current directory if it is below, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def module(name: str) -> list[str]:
    """Return the beginning of a command that runs the program ``name``: ``grpo`` if that was called, else Python."""
    grpo = Path(sys.argv[0])
    if grpo.name == "grpo":
        shown = "grpo" if shutil.which("grpo") == str(grpo) else shown_path(grpo)
        return [shown, next(command for command, program in COMMANDS.items() if program.startswith(name))]
    return [shown_path(Path(sys.prefix) / "bin" / "python"), "-m", name]


def _repeated(option: str, values: Sequence[object]) -> list[str]:
    return [part for value in values for part in (option, str(value))]
