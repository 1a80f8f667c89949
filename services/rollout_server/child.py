"""Runs a module as a child process of the launcher: ``python child.py MODULE [arguments]``.

What its own command line would not give: the process ends when its launcher does, however that came about, and the
token is put behind ``--api-key`` inside the process, since everybody can read command lines, and kept out of its log.

It runs in SGLang's environment too, where nothing of this project is installed: only the standard library is imported.
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
"""Among the arguments: replaced by ``--api-key <JOBGROUP_TOKEN>``, or by nothing when there is none."""

LAUNCHER_VARIABLE = "ROLLOUT_LAUNCHER_PID"
POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Makes this process end when the process named by LAUNCHER_VARIABLE has ended."""
    launcher = int(os.environ[LAUNCHER_VARIABLE])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have ended before the call above.
        if os.getppid() != launcher:
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(launcher,), name="launcher-watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    # This process leads a group of its own, with all that it started.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def keep_out_of_log(secret: str) -> None:
    """Makes log records show asterisks in place of ``secret``: SGLang logs all its arguments."""
    make = logging.getLogRecordFactory()

    def make_without(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        if secret in text:
            record.msg, record.args = text.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(make_without)


def main() -> None:
    """Becomes the module."""
    module, *arguments = sys.argv[1:]
    end_with_launcher()
    if API_KEY_FROM_TOKEN in arguments:
        place = arguments.index(API_KEY_FROM_TOKEN)
        token = os.environ.get("JOBGROUP_TOKEN")
        arguments[place : place + 1] = ["--api-key", token] if token else []
        if token:
            keep_out_of_log(token)
    # This file's folder is not where modules are looked for; as with `python -m`, the working directory is.
    sys.path[0] = os.getcwd()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
