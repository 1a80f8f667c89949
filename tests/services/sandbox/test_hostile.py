"""Hostile code costs only itself: on every backend, as root and as an ordinary user, and as in a default container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.sandbox.kernel import landlock_version
from tests.services.sandbox import hostile
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SYSTEM_PYTHON = "/usr/bin/python3"
ORDINARY = 65_534
IS_ROOT = os.geteuid() == 0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")


def run(script: str, *arguments: str, is_container: bool, user: int | None) -> subprocess.CompletedProcess[str]:
    """Run a script of the standard library on the Python that ``user`` can reach, perhaps as in a container."""
    python = sys.executable if user is None else SYSTEM_PYTHON
    command = [python, *([str(HERE / "stand_in.py"), python] if is_container else []), *script.split(), *arguments]
    identity: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, python], cwd="/", env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, **identity
    )


def check_can_run(backend: str, user: int | None) -> None:
    if backend == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if backend == "landlock" and not landlock_version():
        pytest.skip("the kernel has no Landlock")
    if user is not None and not (IS_ROOT and Path(SYSTEM_PYTHON).exists()):
        pytest.skip("only root can become another user, for whom the system's Python is needed")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize(
    ("backend", "user", "is_container"),
    [
        ("bwrap", None, False),
        ("bwrap", ORDINARY, False),
        ("landlock", None, False),
        ("landlock", ORDINARY, True),
    ],
)
def test_each_costs_only_itself(backend: str, user: int | None, is_container: bool) -> None:
    check_can_run(backend, user)
    done = run(str(HERE / "hostile.py"), backend, is_container=is_container, user=user)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind, table in (("answers", hostile.ANSWERS), ("calls", hostile.CALLS), ("programs", hostile.PROGRAMS)):
        outcomes = {name: found[kind][name]["outcome"] for name in table}
        unexpected = {
            name: found[kind][name] for name, (_, expected) in table.items() if outcomes[name] not in expected
        }
        assert unexpected == {}, kind
    assert {name: passed for name, passed in found["asserts"].items() if passed not in (None, [False])} == {}
    # Right code runs after each of them.
    assert [name for name, is_right in found["after"].items() if not is_right] == []
    # Nothing of theirs outlives them, and nothing of ours has changed.
    assert found["left"] == []
    assert found["boxes"] == []
    assert (found["secret"], found["mode"], found["sibling"]) == ("secret", 0o666, "secret")
    # A link in the box leads nowhere, and a daemon wrote nothing after its program's end.
    assert found["link"]["outcome"] == found["late"]["outcome"] == "failed"
    # Values of the answer's own classes do not come out.
    assert "not a plain value" in found["calls"]["object as reply"]["reply"]


@pytest.mark.slow
@pytest.mark.parametrize("user", [None, ORDINARY])
def test_in_a_container_bubblewrap_is_refused_in_its_own_words_and_landlock_holds(user: int | None) -> None:
    check_can_run("bwrap", user)
    check_can_run("landlock", user)
    done = run("-m services.sandbox.probe", is_container=True, user=user)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "ermi" in lines["bwrap"]  # "No permissions", "Operation not permitted"
    assert lines["landlock"] == "holds"
