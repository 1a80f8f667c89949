"""What is asked for by name shows what it says, or fails and says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
