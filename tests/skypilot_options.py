"""Which options SkyPilot's commands have, for tests of documents.

One process for all commands: each `sky ... --help` takes seconds.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]
SKYPILOT = Path(os.environ.get("SKYPILOT_PYTHON", ROOT / ".venv-sky/bin/python"))

_SCRIPT = """
import json, sys
import click
from sky.client.cli.command import cli
def walk(command, path):
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            walk(one, [*path, name])
    else:
        found[" ".join(path)] = [o for p in command.params for o in [*p.opts, *p.secondary_opts] if o.startswith("-")]
found = {}
walk(cli, [])
print("OPTIONS " + json.dumps(found))
"""


def options(home: Path) -> dict[str, list[str]]:
    """The options of each command, such as ``jobs launch``; skips the test where there is no SkyPilot."""
    if not SKYPILOT.exists():
        pytest.skip(f"no SkyPilot at {SKYPILOT}; `make test` installs it")
    done = subprocess.run(
        [SKYPILOT, "-c", _SCRIPT],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("OPTIONS ")]
    found: dict[str, list[str]] = json.loads(line.removeprefix("OPTIONS "))
    return found


def check(command: str, known: dict[str, list[str]]) -> None:
    """That ``command``, a line that begins with ``sky``, is a command with such options, and its files exist."""
    _, *words = shlex.split(command)
    path = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    assert path in known, command
    for word in words:
        assert not word.startswith("-") or word in known[path], word
        assert not word.endswith(".yaml") or (ROOT / word).exists(), word
