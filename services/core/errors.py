"""Errors that end a component, and the exit codes that SkyPilot's ``job_recovery`` reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

EXIT_FAILED = 1
"""An error that nobody foresaw, or what a component needs never came up. Not listed, so restarts are bounded by
``max_restarts_on_errors``."""

EXIT_RECOVERABLE = 33
"""A dependency that was there is lost; a restart may cure it. Listed in ``recover_on_exit_codes`` of every task, so
restarts are not bounded: an error that comes back each time must not end with it."""

EXIT_PEER_LOST = 34
"""Another rank of the trainer went away; it has the reason, which may come back each time, so this code is not listed
either. SkyPilot recovers from the loss of a node whatever the codes are."""

EXIT_CONFIGURATION = 78
"""A setting, dataset or model cannot be had, or an engine never came up in several starts; a restart would fail alike.
sysexits.h calls it EX_CONFIG."""


class ConfigurationError(Exception):
    """A setting, dataset or model that cannot be had. The message says what, where and what to do."""


class DependencyLostError(Exception):
    """A service did not answer within its deadline, retries included. The message names it and the last error."""


class NeverReadyError(Exception):
    """What a component needs was not there when it started, and did not come up within the deadline of the start."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut at 300 characters; its type's name where it has no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def exit_code_of(main: Callable[[], None]) -> int:
    """Runs ``main`` and returns the exit code that SkyPilot's ``job_recovery`` reads; one line on stderr says why."""
    try:
        main()
    except ConfigurationError as error:
        say_error(error)
        return EXIT_CONFIGURATION
    except DependencyLostError as error:
        say_error(error)
        return EXIT_RECOVERABLE
    except NeverReadyError as error:
        say_error(error)
        return EXIT_FAILED
    return 0


def say_error(error: Exception) -> None:
    """Write an error's line to stderr, if that can be written: a log on a full disk must not change the exit code."""
    # Past the buffer of sys.stderr: Python ends with 120 when the log's disk is full and something is left in it.
    with contextlib.suppress(OSError):
        os.write(2, f"error: {error}\n".encode("utf-8", "backslashreplace"))
