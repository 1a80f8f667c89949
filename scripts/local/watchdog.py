"""Ends the processes of a run whose runner died without doing so: ``python -m scripts.local.watchdog MARK``.

The runner holds the other end of this process's standard input and never writes to it. The end of the input is the end
of the runner, however it came about.
"""

from __future__ import annotations

import signal
import sys

from scripts.local import processes

GRACE_SECONDS = 5.0


def main() -> None:
    """Waits for the runner's end, then ends what is left."""
    # Ctrl-C and hang-ups are the runner's to handle.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    processes.end([sys.argv[1]], GRACE_SECONDS)


if __name__ == "__main__":
    main()
