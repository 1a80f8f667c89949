"""Errors that end a component, and the exit codes that SkyPilot's ``job_recovery`` reads."""

from __future__ import annotations

import contextlib
import errno
import os
import sysconfig
import traceback
from collections.abc import Callable
from typing import ClassVar

EXIT_FAILED = 1
"""An unexpected error, or a dependency that never came up. ``services.core.restarts`` bounds the restarts."""

EXIT_RECOVERABLE = 33
"""A dependency was lost that had answered before, or the volume is full: it may come back, or get more room, without a
change of the job. Listed in ``recover_on_exit_codes`` of every task, so restarts are unbounded: an error that stays
until somebody changes the job must not use this code."""

EXIT_PEER_LOST = 34
"""Another rank of the trainer went away. That rank knows the reason, and the reason may recur, so this code is not
listed either. SkyPilot recovers a lost node after any exit code."""

EXIT_CONFIGURATION = 78
"""A setting is wrong, a dataset or model cannot be loaded, or an engine never came up in several starts. A restart
would fail again. sysexits.h calls this code EX_CONFIG."""


_INSTALLED = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/", "<frozen ")
_COMPONENTS = ("services.", "trainer.", "evaluation.")


class ComponentError(Exception):
    """An error that ends a component: the user gets its message in one line, and SkyPilot its exit code."""

    exit_code: ClassVar[int] = EXIT_FAILED


class ConfigurationError(ComponentError):
    """A wrong setting, or a dataset or model that cannot be loaded. The message says what, where and what to do."""

    exit_code = EXIT_CONFIGURATION


class DamagedFileError(ConfigurationError, ValueError):
    """A file of a run that does not hold what this project writes there. The message names the file and the place."""


class DependencyLostError(ComponentError):
    """A service did not answer within its deadline, retries included. The message names it and the last error."""

    exit_code = EXIT_RECOVERABLE


class NeverReadyError(ComponentError):
    """A dependency was missing when a component started, and did not come up within the deadline of the start."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut at 300 characters; its type's name where it has no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def own_error(error: BaseException, most: int | None = None) -> str:
    """Return in one line the type and text of an error, and the place in the user's code that it last passed, if any.

    The text is cut at ``most`` characters, the place is not.
    """
    text = " ".join(str(error).split())[:most]
    description = f"{type(error).__name__}: {text}" if text else type(error).__name__
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        # A program started by its name, such as the check of REWARD_FN, is called __main__, except in its __spec__.
        spec = frame.f_globals.get("__spec__")
        code, module = frame.f_code, spec.name if spec else frame.f_globals.get("__name__", "")
        if not module.startswith(_COMPONENTS) and not any(part in code.co_filename for part in _INSTALLED):
            return f"{description} ({code.co_filename}, line {line}, in {code.co_qualname})"
    return description


def exit_code_of(main: Callable[[], object]) -> int:
    """Run ``main`` and return the exit code for SkyPilot's ``job_recovery``; write an error's line to stderr."""
    try:
        main()
    except ComponentError as error:
        say_error(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        say_error(ConfigurationError(f"{error.strerror}: raise the limit of this shell, such as by `ulimit -n 4096`"))
        return EXIT_CONFIGURATION
    return 0


def say_error(error: Exception) -> None:
    """Write an error's line to stderr; a log on a full disk must not change the exit code."""
    # Not through sys.stderr: when the log's disk is full and its buffer is not empty, Python exits with 120.
    with contextlib.suppress(OSError):
        os.write(2, f"error: {error}\n".encode("utf-8", "backslashreplace"))
