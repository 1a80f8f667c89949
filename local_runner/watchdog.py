"""Ends the processes of a run whose runner died without doing so: ``python -m local_runner.watchdog MARK``.

The runner holds the other end of this process's standard input and never writes to it. The end of the input is the end
of the runner, however it came about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from local_runner import processes

GRACE_SECONDS = 5.0


@contextlib.contextmanager
def guard(mark: str) -> Iterator[None]:
    """Has the processes marked ``mark`` ended even if this process is killed."""
    environment_without_mark = {name: value for name, value in os.environ.items() if name != processes.MARK}
    # Leaving the context closes its input, whereupon it finds nothing to end and ends itself.
    with subprocess.Popen(
        [sys.executable, "-m", "local_runner.watchdog", mark],
        stdin=subprocess.PIPE,
        env=environment_without_mark,
        start_new_session=True,
    ):
        yield


def main() -> None:
    """Waits for the runner's end, then ends what is left."""
    # Ctrl-C and hang-ups are the runner's to handle.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    processes.end([sys.argv[1]], GRACE_SECONDS)


if __name__ == "__main__":
    main()
