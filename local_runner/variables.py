"""Checks of a run's variables before anything starts: a component reads each name, and the values are allowed.

A component ignores the variables of others, because ``--env`` reaches every task, so no component notices a misspelt
name.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from local_runner.environment import Run, node_environment
from local_runner.settings_classes import READERS, Reader
from local_runner.spec import JobGroup, TaskSpec, nearest
from services.core.errors import ConfigurationError
from services.core.settings import Settings

S = TypeVar("S", bound=Settings)

LIBRARIES = (
    *("AWS_", "AZURE_", "CUBLAS_", "CUDA_", "DNNL_", "DYLD_", "FI_", "FLASHINFER_", "GIT_", "GLIBC_", "GLOO_"),
    *("GOMP_", "GOOGLE_", "HF_", "HSA_", "HUGGING", "KMP_", "KUBE", "LC_", "LD_", "LIBC_", "MALLOC_", "MKL_", "NCCL_"),
    *("NVIDIA_", "NVTE_", "OMP_", "ONEDNN_", "OPENAI_", "OPENBLAS_", "OTEL_", "PIP_", "PYTHON", "PYTORCH_", "RAY_"),
    *("REQUESTS_", "ROCR_", "RUST_", "S3_", "SGLANG_", "SGL_", "SKYPILOT_", "SSL_", "TOKENIZERS_", "TORCH", "TRITON_"),
    *("TRANSFORMERS_", "UCX_", "UV_", "VIRTUAL_ENV", "WANDB_", "XDG_"),
)
"""The prefixes of variables that libraries and the system read."""

SYSTEM = {"CI", "DEBUG", "HOME", "HOSTNAME", "LANG", "NO_COLOR", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"}
LIKE_A_SETTING = 0.9
"""A library's variable counts as a misspelt setting if it is at least this similar to one (difflib's ratio)."""


def check_names(group: JobGroup, options: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Check that a component reads every given variable; a name that the job group's file declares passes.

    Args:
        group: the job group.
        options: variables of the command line, which a component of this job group must read.
        files: variables of files, which may serve several job groups, so a component of any may read them.

    Raises:
        ConfigurationError: no component reads a variable; the message has the nearest name.
    """
    readers: dict[str, list[str]] = {}
    for reader in READERS:
        for field in reader.settings_class().model_fields:
            readers.setdefault(field.upper(), []).extend(reader.tasks)
    tasks = {task.name for task in group.tasks}
    declared = {name for task in group.tasks for name in task.declared}
    problems = []
    for name in dict.fromkeys((*options, *files)):
        if name in declared or _is_foreign(name, readers):
            continue
        if name.upper() not in readers:
            near = nearest(name.upper(), {*readers, *declared}, "nearest setting")
            problems.append(
                f"{name} is read by no component{near}. If your own code reads it, declare it under "
                "`envs` of its task in the job group's file"
            )
        elif name in options and not tasks.intersection(readers[name.upper()]):
            owners = " and ".join(readers[name.upper()])
            problems.append(f"{name} is read by {owners} alone, which job group {group.name} does not have")
    if problems:
        raise ConfigurationError("; ".join(problems))


def check_values(run: Run) -> None:
    """Check the settings of every task by loading them as its first node will.

    Raises:
        ConfigurationError: a value is not allowed; the message names the tasks that refuse it.
    """
    problems: dict[str, list[str]] = {}
    for task in run.group.tasks:
        for reader in READERS:
            if task.name not in reader.tasks:
                continue
            try:
                load_settings(run, task, reader.settings_class())
            except ConfigurationError as error:
                problems.setdefault(str(error), []).append(task.name)
    if problems:
        raise ConfigurationError("; ".join(f"{', '.join(tasks)}: {problem}" for problem, tasks in problems.items()))


def load_settings(run: Run, task: TaskSpec, settings_class: type[S]) -> S:
    """Return the settings that the first node of ``task`` will load.

    Raises:
        ConfigurationError: a value is not allowed.
    """
    with _environment(node_environment(run, task, 0)):
        return settings_class.load()


def all_settings(run: Run) -> Iterator[tuple[TaskSpec, Reader, Settings]]:
    """Yield the settings of each task of a run, by the component that reads them.

    Raises:
        ConfigurationError: a value is not allowed.
    """
    for task in run.group.tasks:
        for reader in READERS:
            if task.name in reader.tasks:
                yield task, reader, load_settings(run, task, reader.settings_class())


def as_keywords(message: str, given: Iterable[str]) -> str:
    """Return ``message`` with the names of settings and those of ``given`` as keywords of ``train``: in lower case."""
    names = {field.upper() for reader in READERS for field in reader.settings_class().model_fields} | set(given)
    return re.sub(r"\b[A-Z][A-Z0-9_]*\b", lambda found: found[0].lower() if found[0] in names else found[0], message)


def _is_foreign(name: str, settings: Iterable[str]) -> bool:
    """Return whether a library or the system reads ``name``, and it is not a misspelt setting."""
    upper = name.upper()
    if upper in settings:
        return False
    if upper in SYSTEM or upper.endswith("_PROXY"):
        return True
    return upper.startswith(LIBRARIES) and not difflib.get_close_matches(upper, settings, 1, LIKE_A_SETTING)


def setting_like(name: str) -> str | None:
    """Return the setting that has a name or begins or ends with it, as MAX_STEPS for ``steps``; None without one."""
    name = name.upper()
    settings = {field.upper() for reader in READERS for field in reader.settings_class().model_fields}
    like = [
        one for one in sorted(settings) if f"_{name}_" in f"_{one}_" and (one.startswith(name) or one.endswith(name))
    ]
    return next(iter(difflib.get_close_matches(name, like, 1, 0.0)), None)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment by ``variables`` within the context."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
