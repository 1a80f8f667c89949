"""A crash restarts its task three times; a wrong setting ends it at once, and a lost dependency restarts it always."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE
from services.core.restarts import CRASHES, EXIT_CRASHED, code_for_skypilot
from tests.skypilot_facts import ROOT


@pytest.mark.parametrize("code", [0, EXIT_RECOVERABLE, EXIT_CONFIGURATION, 130, 143])
def test_codes_with_a_meaning_of_their_own_are_no_crashes(tmp_path: Path, code: int) -> None:
    counter = tmp_path / "counter"
    assert {code_for_skypilot(code, counter) for _ in range(CRASHES + 2)} == {code}
    assert not counter.exists()


@pytest.mark.parametrize(("code", "last"), [(1, EXIT_CRASHED), (34, 34), (137, 137), (139, 139), (2, 2)])
def test_a_crash_restarts_the_task_three_times(tmp_path: Path, code: int, last: int) -> None:
    codes = [code_for_skypilot(code, tmp_path / "new" / "counter") for _ in range(CRASHES + 2)]
    assert codes == [EXIT_RECOVERABLE] * CRASHES + [last] * 2


@pytest.mark.parametrize("section", ["setup", "run"])
def test_the_commands_of_the_job_group_end_so(tmp_path: Path, section: str) -> None:
    trainer = list(yaml.safe_load_all((ROOT / "jobgroup.yaml").read_text()))[1]
    first, *_, command = trainer[section].splitlines()
    _, end = command.split(" || ")
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TMPDIR": str(tmp_path),
        "SKYPILOT_TASK_ID": "sky-managed-2026-01-01_grpo_ppo-trainer_1-0",
        "SKYPILOT_NODE_RANK": "1",
    }

    def code_after(code: str) -> int:
        script = f"{first}\n(exit {code}) || {end}\n"
        return subprocess.run(["bash", "-c", script], env=environment, cwd=ROOT, capture_output=True).returncode

    assert [code_after("0"), code_after("78"), code_after("139")] == [0, 78, 33]
    [counter] = tmp_path.glob("*/*")
    assert counter.read_text() == "1"
