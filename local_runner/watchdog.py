"""End the processes of a run whose runner died before it could: ``python -m local_runner.watchdog MARK``.

The runner holds the other end of this process's standard input and never writes to it. The input ends when
the runner ends, however it ends.
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
    """End the processes marked ``mark`` even if this process is killed within the context."""
    environment_without_mark = {name: value for name, value in os.environ.items() if name != processes.MARK}
    # When the context is left, the watchdog's input closes; it then finds nothing to end, and ends itself.
    with subprocess.Popen(
        [sys.executable, "-m", "local_runner.watchdog", mark],
        stdin=subprocess.PIPE,
        env=environment_without_mark,
        start_new_session=True,
    ):
        yield


def main() -> None:
    """Wait for the runner's end, then end the processes that are left."""
    # The runner handles Ctrl-C and hang-ups.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    processes.end([sys.argv[1]], GRACE_SECONDS)


if __name__ == "__main__":
    main()
