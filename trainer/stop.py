"""``python3 trainer/stop.py``: ask this node's trainer to stop in order, and wait until it has.

The hook in jobgroup.yaml runs it on the trainer's first node before `sky jobs cancel` deletes the pods, which get no
signal. It imports the standard library alone, because hooks run outside the task's environment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

POLL_SECONDS = 0.1


def main(task_id: str = "sky-managed-") -> None:
    """Send SIGTERM to rank 0, or else to the only trainer, and return when its process has ended.

    Rank 0 tells the other ranks, writes a checkpoint of the last completed step with them, and exits with 143.

    Args:
        task_id: the beginning of the trainer's SKYPILOT_TASK_ID.
    """
    ranks = dict(_trainers(task_id))
    # Where ranks have a launcher, it has the same command and no RANK.
    chosen = [pid for pid, rank in ranks.items() if rank == "0"] or list(ranks)
    started = time.monotonic()
    for pid in chosen:
        os.kill(pid, signal.SIGTERM)
        print(f"trainer: asked process {pid} to stop", flush=True)
    while any(pid in dict(_trainers(task_id)) for pid in chosen):
        time.sleep(POLL_SECONDS)
    print(f"trainer: nothing runs, after {time.monotonic() - started:.0f} s", flush=True)


def _trainers(task_id: str) -> Iterator[tuple[int, str]]:
    """Yield pid and RANK ("" without one) of every `python -m trainer` of the task."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command, environment = (_strings(f"/proc/{name}/{file}") for file in ("cmdline", "environ"))
        except OSError:  # gone meanwhile, or another user's
            continue
        variables = dict(entry.partition("=")[::2] for entry in environment)
        if command[-2:] == ["-m", "trainer"] and variables.get("SKYPILOT_TASK_ID", "").startswith(task_id):
            yield int(name), variables.get("RANK", "")


def _strings(path: str) -> list[str]:
    with open(path, "rb") as file:
        return file.read().decode(errors="replace").split("\0")[:-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
