"""Models, data files and functions of the user's own that settings name, looked for before a run starts.

A component's module ``own_code`` imports its functions as the component will, in a process of its own with the node's
environment, because an import may take memory, print, or read variables. So do the modules that read data and models.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from local_runner.environment import Run, node_environment
from local_runner.spec import TaskSpec
from local_runner.variables import all_settings
from services.core.errors import ConfigurationError
from services.core.files import check_model
from services.core.settings import Settings
from services.data_server.settings import DataSettings, check_file, named_files

IMPORT_SECONDS = 120.0
"""Longest time that the import of a component's functions may take."""
ERROR = "error: "
"""The beginning of the line in which ``exit_code_of`` names an error."""


def check(run: Run) -> None:
    """Check that the files exist and the functions can be imported that the settings of the run's tasks name.

    Raises:
        ConfigurationError: one does not exist or cannot be used; the message names the tasks that need it.
    """
    problems: dict[str, list[str]] = {}
    for task, reader, settings in all_settings(run):
        package = reader.module.rpartition(".")[0]
        for problem in (*_missing_files(settings), *_failed_imports(run, task, settings, package)):
            problems.setdefault(problem, []).append(task.name)
    if problems:
        raise ConfigurationError("; ".join(f"{', '.join(tasks)}: {problem}" for problem, tasks in problems.items()))


def unchecked_models(run: Run) -> list[str]:
    """Return the models that are neither directories nor known to the Hugging Face hub, because it does not answer.

    Raises:
        ConfigurationError: the hub answers that it has no such model.
    """
    named = ((getattr(settings, "model_name", None), task) for task, _, settings in all_settings(run))
    tasks = {model: task for model, task in named if model and not Path(model).expanduser().exists()}
    if importlib.util.find_spec("huggingface_hub") is None:
        return list(tasks)
    return [model for model, task in tasks.items() if not ask(run, task, "services.core.models", model)]


def ask(run: Run, task: TaskSpec, module: str, *arguments: str, seconds: float = IMPORT_SECONDS) -> str:
    """Run a module as the first node of ``task`` would, and return what it prints.

    Raises:
        ConfigurationError: the module ends with an error, which is the message.
        TimeoutError: it takes more than ``seconds``.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = node_environment(run, task, 0)
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{module} takes more than {seconds:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{' '.join(command)} ended with exit code {done.returncode}"]
        said = next((line.removeprefix(ERROR) for line in reversed(lines) if line.startswith(ERROR)), lines[-1])
        raise ConfigurationError(said)
    return done.stdout


def _missing_files(settings: Settings) -> Iterator[str]:
    try:
        if model := getattr(settings, "model_name", None):
            check_model(model)
    except ConfigurationError as error:
        yield str(error)
    if not isinstance(settings, DataSettings):
        return
    for variable, path in named_files(settings).items():
        try:
            check_file(variable, path)
        except ConfigurationError as error:
            yield str(error)


def _failed_imports(run: Run, task: TaskSpec, settings: Settings, package: str) -> Iterator[str]:
    if not settings.own_functions:
        return
    try:
        ask(run, task, f"{package}.own_code")
    except TimeoutError:
        given = ", ".join(f"{variable}={value}" for variable, value in settings.own_functions.items())
        yield f"{given}: the import takes more than {IMPORT_SECONDS:.0f} s; load what is large at the first call"
    except ConfigurationError as error:
        yield str(error)
