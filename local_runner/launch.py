"""The command line that starts a run: its parts, its record in launch.json, and the commands that may follow it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from local_runner.checks import READERS, check_names, load_settings
from local_runner.nodes import LocalRun, check_mounts
from local_runner.spec import JobGroup, Overrides, assignments, counts, env_files, load
from services.core.endpoints import Task
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from services.core.files import read_from, read_object, write_json
from services.core.settings import SECRET
from services.data_server.settings import HARBOR

if TYPE_CHECKING:
    from trainer.config import TrainerSettings

FILE = "launch.json"
"""The file of a run directory with the command line that started the run."""


@dataclass(frozen=True)
class Launch:
    """The command line that starts a run, without its ``--run-id``; settings and secrets are NAME=VALUE or NAME."""

    job_group: Path
    env: Sequence[str] = ()
    env_files: Sequence[Path] = ()
    secrets: Sequence[str] = ()
    num_nodes: Sequence[str] = ()
    small: bool = False
    shared_dir: Path = Path()

    def group(self) -> tuple[JobGroup, Overrides]:
        """Return the job group with the additions of the command line, and these additions.

        Raises:
            ConfigurationError: the file or an option is wrong, or no component reads a variable.
        """
        in_files, options = env_files(self.env_files), assignments(self.env, "--env")
        secrets = assignments(self.secrets, "--secret")
        overrides = Overrides(in_files | options, secrets, counts(self.num_nodes), 1 if self.small else None)
        group = load(self.job_group, overrides)
        check_names(group, options | secrets, in_files)
        check_mounts(group)
        return group, overrides

    def with_env(self, env: Sequence[str]) -> Launch:
        """Return the command line with ``env`` in place of earlier values of its variables."""
        replaced = {assignment.partition("=")[0] for assignment in env}
        kept = [assignment for assignment in self.env if assignment.partition("=")[0] not in replaced]
        return replace(self, env=[*kept, *env])

    @property
    def recorded_env(self) -> list[str]:
        """The options of --env with their values, but of secrets the names alone."""
        return [*map(recorded, self.env)]

    def again(self, run_id: str) -> list[str]:
        """Return the command that continues the run, with the names of its secrets alone."""
        options = [*_repeated("--env-file", self.env_files), *_repeated("--env", self.recorded_env)]
        options += [*_repeated("--secret", _names(self.secrets)), *_repeated("--num-nodes", self.num_nodes)]
        options += ["--small"] if self.small else []
        options += ["--shared-dir", str(self.shared_dir)] if self.shared_dir != Path() else []
        return [grpo_command(), "run", str(self.job_group), *options, "--run-id", run_id]

    def record(self, run_dir: Path) -> None:
        """Write launch.json, from which ``grpo fork`` starts the run again; values of secrets are left out."""
        content = {
            "directory": os.getcwd(),
            "job_group": str(self.job_group),
            "env": self.recorded_env,
            "env_files": [str(path) for path in self.env_files],
            "in_files": _open(env_files(self.env_files)),
            "secrets": _names(self.secrets),
            "num_nodes": [*self.num_nodes],
            "small": self.small,
        }
        write_json(run_dir / FILE, content)


def read_launch(run_dir: Path) -> tuple[Launch, Path] | None:
    """Return the command line that started a run, and the directory in which it did; None where the run does not say.

    Raises:
        ConfigurationError: a file of variables has others now.
    """
    with read_from(run_dir / FILE):
        content = read_object(run_dir / FILE)
        if not content:
            return None
        where, files = Path(content.pop("directory")), [Path(path) for path in content.pop("env_files")]
        # A file that is not there is this project's, as it was for the run.
        read = [where / path if (where / path).exists() else path for path in files]
        if _open(env_files(read)) != content.pop("in_files"):
            place = f"{', '.join(map(str, files))} in {where}"
            raise ConfigurationError(f"{place} has other variables than when {run_dir.name} was started; restore it")
        return Launch(Path(content.pop("job_group")), env_files=files, **content), where


def recorded(assignment: str) -> str:
    """Return an option of --env with its value, which may be in the environment; the name alone of a secret.

    A fork takes secrets from its own environment.
    """
    name, given, _ = assignment.partition("=")
    if SECRET.search(name):
        return name
    return assignment if given else f"{name}={os.environ.get(name, '')}"


def next_commands(run: LocalRun, launch: Launch, summary: Mapping[str, Any], exit_code: int) -> list[tuple[str, str]]:
    """Return purpose and command of what may come after a run.

    Args:
        run: the run.
        launch: the command line that started it.
        summary: the trainer's summary.json; empty if the trainer has written none.
        exit_code: the run's exit code.
    """
    directory, again = shown_path(run.run_dir), launch
    # Functions of the script that started the run are there.
    own = [f"PYTHONPATH={directory}/inputs"] if any((run.run_dir / "inputs").glob("*.py")) else []
    purpose = ""
    commands = [("look at it", shlex.join([grpo_command(), "view", directory]))]
    has_checkpoint = any((run.run_dir / "checkpoints").glob("*"))
    if summary.get("status") == "succeeded" and (run.run_dir / "model").exists():
        settings = trainer_settings(run)
        # Of environments, only those of tasks are evaluated without the run's environment-servers.
        ways = [one.way.services for one in settings.by_source().values()]
        has_tasks = any(task.environment.get("DATASET", "").startswith(HARBOR) for task in run.group.tasks)
        if has_tasks or any(Task.ENVIRONMENT_SERVER not in services for services in ways):
            given = [*_repeated("--env-file", launch.env_files), *_repeated("--env", launch.recorded_env)]
            evaluate = [*own, grpo_command(), "evaluate", "--model", f"{directory}/model", *given]
            commands.append(("evaluate", shlex.join(evaluate)))
        chat = shlex.join([grpo_command(), "chat", directory])
        commands.append(("chat with it and with the model it began as", chat))
        if has_checkpoint:
            # Twice as many steps, with prompts for all of them.
            limit = [f"MAX_STEPS={2 * int(summary['steps'])}"] if settings.max_steps else []
            purpose, again = "train on", launch.with_env([*limit, f"NUM_EPOCHS={2 * settings.num_epochs}"])
    elif has_checkpoint or any(task.name == Task.TRAINER for task in run.group.tasks):
        purpose = "resume" if has_checkpoint else "start again"
        purpose += ", after the correction" if exit_code == EXIT_CONFIGURATION else ""
    if purpose:
        commands.append((purpose, shlex.join([*own, *again.again(run.run_id)])))
    return commands


def trainer_settings(run: LocalRun) -> TrainerSettings:
    """Return the settings of the run's trainer."""
    [trainer] = [task for task in run.group.tasks if task.name == Task.TRAINER]
    [reader] = [reader for reader in READERS if Task.TRAINER in reader.tasks]
    return cast("TrainerSettings", load_settings(run, trainer, reader.settings_class()))


def _open(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not secret."""
    return {name: value for name, value in variables.items() if not SECRET.search(name)}


def _names(secrets: Sequence[str]) -> list[str]:
    return [secret.partition("=")[0] for secret in secrets]


def _repeated(option: str, values: Sequence[object]) -> list[str]:
    return [part for value in values for part in (option, str(value))]


def shown_path(path: Path) -> str:
    """Return ``path`` relative to the current directory if it is below, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def grpo_command() -> str:
    """Return the beginning of a command line of this project: ``grpo``, or its path if PATH does not lead there."""
    program = Path(sys.argv[0]) if Path(sys.argv[0]).name == "grpo" else Path(sys.prefix) / "bin" / "grpo"
    return "grpo" if shutil.which("grpo") == str(program) else shown_path(program)
