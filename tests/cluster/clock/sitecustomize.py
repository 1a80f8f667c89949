"""A system clock that jumps, for the programs on a node: by the seconds that the file CLOCK_JUMP_FILE holds, if any.

Linux has no clock of its own for a namespace, so Python's is changed. What measures spans of time has another clock.
"""

import os
import time

_real_time = time.time
_file = os.environ.get("CLOCK_JUMP_FILE", "")


def _time() -> float:
    try:
        with open(_file) as file:
            return _real_time() + float(file.read() or 0)
    except FileNotFoundError:
        return _real_time()


if _file:
    time.time = _time
