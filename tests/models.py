"""Models that are made once for all tests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]


def made_once(name: str, sources: Sequence[Path], module: str) -> Path:
    """Return a directory below .cache/tests that ``python -m module DIR`` fills, anew when ``sources`` change.

    Of several processes that want it at once, one makes it.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    directory = ROOT / ".cache" / "tests" / f"{name}-{digest}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock"), timeout=LIMIT_SECONDS):
        if not directory.exists():
            made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
            subprocess.run([sys.executable, "-m", module, str(made)], check=True, cwd=ROOT)
            made.rename(directory)
    return directory
