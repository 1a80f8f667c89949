"""``python -m services.core.restarts CODE``: print the exit code with which a task's command ends for SkyPilot.

SkyPilot restarts a task without limit on the codes that ``recover_on_exit_codes`` lists, and on all others, 78
included, ``max_restarts_on_errors`` times. A wrong setting should end the task at once, and a crash should not. So the
job groups list EXIT_RECOVERABLE and allow no restarts on errors, and this program makes EXIT_RECOVERABLE of the first
crashes. They also list 1, with which SkyPilot's own commands end while the pods of the other tasks are not up.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from services.core.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_RECOVERABLE

CRASHES = 3
"""Restarts after a crash, on each node and in total; a node that SkyPilot replaces begins again."""
EXIT_CRASHED = 70
"""Stands for EXIT_FAILED after the last restart. sysexits.h calls this code EX_SOFTWARE."""
_PASSED = (0, EXIT_RECOVERABLE, EXIT_CONFIGURATION, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def code_for_skypilot(code: int, counter: Path) -> int:
    """Return the exit code for SkyPilot, and say on stderr what a crash leads to.

    Args:
        code: the exit code of a task's command.
        counter: a file of this node with the number of crashes so far.
    """
    if code in _PASSED:
        return code
    crashes = 1 + (int(counter.read_text(encoding="utf-8")) if counter.exists() else 0)
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(str(crashes), encoding="utf-8")
    if crashes <= CRASHES:
        print(f"crashed with exit code {code}: restart {crashes} of {CRASHES}", file=sys.stderr)
        return EXIT_RECOVERABLE
    print(f"crashed with exit code {code} after {CRASHES} restarts", file=sys.stderr)
    return EXIT_CRASHED if code == EXIT_FAILED else code


def counter_of_node() -> Path:
    """Return the file that counts the crashes of this node's command, of this launch."""
    node = "-".join(os.environ.get(name, "") for name in ("SKYPILOT_TASK_ID", "SKYPILOT_NODE_RANK"))
    return Path(tempfile.gettempdir(), f"grpo-crashes-{os.getuid()}", re.sub(r"\W", "-", node))


if __name__ == "__main__":
    print(code_for_skypilot(int(sys.argv[1]), counter_of_node()))
