"""A Makefile target that a person calls by name runs all its tests, or fails and says what to install."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skypilot import conftest as skypilot
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture
def tool():
    pytest.skip("no tool here; apt-get install tool")

def test_with_a_tool(tool): ...

@pytest.mark.skipif(True, reason="no other tool")
def test_with_another(): ...

@pytest.mark.optional
@pytest.mark.skipif(True, reason="nothing to install")
def test_optional(): ...

@pytest.mark.xfail
def test_expected(): assert False
"""


@pytest.mark.slow
def test_a_skip_fails_under_require_all_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = optional\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--require-all", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", f"-c{tmp_path}/pytest.ini", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 skipped, 1 xfailed, 2 errors" in done.stdout
    assert "cannot run here. Skipped: no tool here; apt-get install tool" in done.stdout
    assert "test_with_another cannot run here. Skipped: no other tool" in done.stdout


def test_every_target_that_tests_requires_all_but_those_that_run_what_they_can() -> None:
    recipes = re.findall(r"^([\w-]+):[^\n]*\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    with_pytest = {target: recipe for target, recipe in recipes if "-m pytest" in recipe}
    lenient = {target for target, recipe in with_pytest.items() if "--require-all" not in recipe}
    assert lenient == {"tests", "test-slow", "test-leaving", "test-busy"}
    assert with_pytest.keys() - lenient == {
        *("test-skipped", "test-sglang", "test-skypilot", "test-oracles", "test-openenv", "test-cuda", "coverage"),
    }


def test_skypilot_says_which_programs_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skypilot, "PYTHON", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = skypilot.why_not()
    assert said is not None
    assert all(program in said for program in ("kubectl", "socat", "nc", "rsync"))
