"""The command line, and the modules that checks ask, in the process of the tests instead of processes of their own."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import structlog

import services.data_server.dataset  # noqa: F401  # before a test has to wait for it
from scripts import grpo
from services.core.errors import exit_code_of

_command = functools.cache(grpo.load_command)


def call(command: str, *words: object) -> int:
    """Run ``grpo command words``, and return its exit code."""
    try:
        return exit_code_of(lambda: _command(command)([str(word) for word in words], prog_name=f"grpo {command}"))
    except SystemExit as end:
        return _code(end)


def answer(command: list[str], *, env: Mapping[str, str], timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
    """Stand for ``subprocess.run``: run the module that the command names here, as the node that has ``env`` would."""
    assert command[:3] == [sys.executable, "-m", "services.core.imports"]
    assert timeout > 0
    module, *arguments = command[3:]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with _as_a_process(env, [module, *arguments]), _raw_errors() as raw:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = _code(end)
            except BaseException:  # noqa: BLE001  # a process prints any error
                code = 1
                traceback.print_exc()
        os.lseek(raw, 0, os.SEEK_SET)
        said = os.read(raw, 2**20).decode()
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue() + said)


@pytest.fixture
def asks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process what a dry run asks other processes: imports of functions, rows, memory."""
    monkeypatch.setattr("local_runner.checks.subprocess", SimpleNamespace(**vars(subprocess) | {"run": answer}))


def _code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


@contextlib.contextmanager
def _as_a_process(env: Mapping[str, str], arguments: list[str]) -> Iterator[None]:
    """Have the variables, arguments and import path of a process; leave no module of its directory and no logging."""
    here, before = Path.cwd(), set(sys.modules)
    forkserver.ensure_running()  # which stays, and must not have the variables below
    root = logging.getLogger()
    handlers, level, events = root.handlers[:], root.level, structlog.get_config()
    changes = (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", [str(here), *sys.path]),
        # It would have torch imported a second time.
        mock.patch("services.data_server.dataset.import_transformers_alone"),
        warnings.catch_warnings(action="ignore"),
    )
    try:
        with contextlib.ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            yield
    finally:
        root.handlers[:], root.level = handlers, level
        structlog.configure(**events)
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(here):
                del sys.modules[name]


@contextlib.contextmanager
def _raw_errors() -> Iterator[int]:
    """Have the file descriptor 2 write to a file, which is yielded."""
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            yield file.fileno()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
