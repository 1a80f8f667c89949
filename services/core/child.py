"""Run a module as a child process of the launcher: ``python child.py MODULE [arguments]``.

The process ends when its launcher ends, for any reason. This program adds the token to the module's arguments, because
everybody can read the command lines of processes, and keeps it out of the module's log.

This file also runs in SGLang's environment, where nothing of this project is installed, so it imports the standard
library only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import sys
import threading
import time
from typing import Any

API_KEY_FROM_TOKEN = "--api-key-from-token"
"""An argument that is replaced by ``--api-key <JOBGROUP_TOKEN>``, or removed when there is no token."""

LAUNCHER_VARIABLE = "ROLLOUT_LAUNCHER_PID"
POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Make this process end when the process whose id is in LAUNCHER_VARIABLE has ended."""
    launcher = int(os.environ[LAUNCHER_VARIABLE])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The launcher may have ended before the call above.
        if os.getppid() != launcher:
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(launcher,), name="launcher-watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    # This process leads a group of its own, which includes everything that it started.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def keep_out_of_log(secret: str) -> None:
    """Replace ``secret`` by asterisks in log records, because SGLang logs all its arguments."""
    make = logging.getLogRecordFactory()

    def make_without(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        if secret in text:
            record.msg, record.args = text.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(make_without)


def main() -> None:
    """Become the module."""
    module, *arguments = sys.argv[1:]
    end_with_launcher()
    if API_KEY_FROM_TOKEN in arguments:
        place = arguments.index(API_KEY_FROM_TOKEN)
        token = os.environ.get("JOBGROUP_TOKEN")
        arguments[place : place + 1] = ["--api-key", token] if token else []
        if token:
            keep_out_of_log(token)
    # Modules are looked up in the working directory, as with `python -m`, and not in this file's folder.
    # SGLang's Python may be older than PYTHONSAFEPATH, which leaves both out.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
