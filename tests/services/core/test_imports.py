"""Programs whose imports are not searched for garbage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, sys
print(__name__, sys.argv[0].endswith("asked.py"), sys.argv[1:], gc.isenabled())
sys.exit(7)
"""


def test_a_module_is_run_with_its_arguments_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "services.core.imports", "asked", "--rows", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "__main__ True ['--rows', '2'] False\n"), done.stderr
