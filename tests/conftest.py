"""What tests of several parts share."""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.hookimpl(wrapper=True)  # which comes before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Tests of a file run in one process, for the sake of what they share; those of the cluster share runs, too."""
    for item in items:
        path = item.path.relative_to(ROOT)
        item.add_marker(pytest.mark.xdist_group("cluster" if path.parts[1] == "cluster" else str(path)))
    return (yield)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A directory with the tiny model, which is made anew only when what makes it has changed. Not to be written to."""
    script = ROOT / "scripts" / "tiny_model.py"
    directory = ROOT / ".cache" / "tests" / f"tiny-model-{hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".tiny-model-", dir=directory.parent))
        # One thread is the fastest for so small a model.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "scripts.tiny_model", str(made)], check=True, env=environment)
        with contextlib.suppress(OSError):  # another session was faster
            made.rename(directory)
    return directory
