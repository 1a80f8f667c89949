"""SkyPilot's own reading of this project's files, and the commands, options and calls that it has."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from local_runner.spec import JOB_GROUPS
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]
SKYPILOT = Path(os.environ.get("SKYPILOT_PYTHON", ROOT / ".venv-sky/bin/python"))
SCRIPT = ROOT / "tests/ask_skypilot.py"
VOLUME = "jobgroups/volume.yaml"
FILES = [*JOB_GROUPS]
FILES += [
    str(path.relative_to(ROOT)) for name in ("evaluation", "scripts") for path in sorted(ROOT.glob(f"{name}/*.yaml"))
]
"""Every job group, and every job in evaluation/ and scripts/."""


@cache
def skypilot_facts() -> dict[str, Any]:
    """Return what tests/ask_skypilot.py says; one process asks for all, and again only when a file has changed.

    Skips the test where SkyPilot is not installed.
    """
    if not SKYPILOT.exists():
        pytest.skip(f"no SkyPilot at {SKYPILOT}; `make test` installs it")
    sources = [SCRIPT, *(ROOT / file for file in [VOLUME, *FILES])]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    path = ROOT / ".cache/tests" / f"skypilot-{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=LIMIT_SECONDS):
        if not path.exists():
            _ask(path)
    return json.loads(path.read_text())


def _ask(path: Path) -> None:
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "facts.json"
        done = subprocess.run(
            [SKYPILOT, SCRIPT, out, VOLUME, *FILES],
            cwd=ROOT,
            env=os.environ | {"HOME": home},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Unknown fields" not in done.stdout + done.stderr
        path.write_text(out.read_text())


def check_command(command: str) -> None:
    """Assert that ``command``, a line that begins with ``sky``, has options that exist and names files that exist."""
    known = skypilot_facts()["options"]
    _, *words = shlex.split(command)
    path = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    assert path in known, command
    for word in words:
        assert not word.startswith("-") or word in known[path], word
        # A value of --env, such as SOURCES=mix.yaml, is the user's own file.
        assert "=" in word or not word.endswith(".yaml") or (ROOT / word).exists(), word


def home_with_gpus(home: Path) -> Path:
    """Make a home with SkyPilot's list of GPUs, which it would fetch, and return it."""
    catalog = home / ".sky/catalogs/v8/common/accelerators.csv"
    catalog.parent.mkdir(parents=True)
    names = ("H100", "H200", "A100-80GB", "L40S")
    catalog.write_text("AcceleratorName,Clouds\n" + "".join(f"{name},\"['Kubernetes']\"\n" for name in names))
    return home
