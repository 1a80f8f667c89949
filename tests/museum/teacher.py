"""The teacher of runs with one, the tiny model from another seed: ``python -m tests.museum.teacher DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

from toys.arithmetic import make

if __name__ == "__main__":
    make(Path(sys.argv[1]), seed=3)
