"""Run a command beside processes that compute: ``python -m tests.busy 20 make tests``; ``make test-busy`` does."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys


def compute() -> None:
    """Compute until this process is killed."""
    while True:
        sum(range(100_000))


def main(n_processes: int, command: list[str]) -> int:
    """Return the exit code of ``command``, which shares the processors with ``n_processes`` others."""
    # Not forked, so that none of them holds a file of this process; daemons end with it.
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=compute, daemon=True) for _ in range(n_processes)]
    for other in others:
        other.start()
    try:
        return subprocess.call(command)
    finally:
        for other in others:
            other.kill()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
