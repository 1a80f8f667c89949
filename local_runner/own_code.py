"""Data files and functions of the user's own that settings name, looked for before a run starts.

A component's module ``own_code`` imports its functions as the component will, in a process of its own with the node's
environment, because an import may take memory, print, or read variables.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from local_runner.environment import Run, node_environment
from local_runner.settings_classes import READERS
from local_runner.spec import TaskSpec
from local_runner.variables import load_settings
from services.core.errors import ConfigurationError
from services.core.settings import Settings
from services.data_server.files import check_file, named_files
from services.data_server.settings import DataSettings

IMPORT_SECONDS = 120.0
"""Longest time that the import of a component's functions may take."""
ERROR = "error: "
"""The beginning of the line in which ``exit_code_of`` names an error."""


def check(run: Run) -> None:
    """Check that the data files exist and the functions can be imported that the settings of the run's tasks name.

    Raises:
        ConfigurationError: one does not exist or cannot be imported; the message names the tasks that need it.
    """
    problems: dict[str, list[str]] = {}
    for task in run.group.tasks:
        for reader in READERS:
            if task.name in reader.tasks:
                settings = load_settings(run, task, reader.settings_class())
                package = reader.module.rpartition(".")[0]
                for problem in (*_missing_files(settings), *_failed_imports(run, task, settings, package)):
                    problems.setdefault(problem, []).append(task.name)
    if problems:
        raise ConfigurationError("; ".join(f"{', '.join(tasks)}: {problem}" for problem, tasks in problems.items()))


def _missing_files(settings: Settings) -> Iterator[str]:
    for variable, path in named_files(settings).items() if isinstance(settings, DataSettings) else ():
        try:
            check_file(variable, path)
        except ConfigurationError as error:
            yield str(error)


def _failed_imports(run: Run, task: TaskSpec, settings: Settings, package: str) -> Iterator[str]:
    if not settings.own_functions:
        return
    command = [sys.executable, "-m", f"{package}.own_code"]
    environment = node_environment(run, task, 0)
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        given = ", ".join(f"{variable}={value}" for variable, value in settings.own_functions.items())
        yield f"{given}: the import takes more than {IMPORT_SECONDS:.0f} s; load what is large at the first call"
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{' '.join(command)} ended with exit code {done.returncode}"]
        yield next((line.removeprefix(ERROR) for line in reversed(lines) if line.startswith(ERROR)), lines[-1])
