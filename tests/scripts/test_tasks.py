"""``grpo tasks check``: its verdicts are kept, and a run has the tasks that passed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from scripts import tasks
from services.data_server import dataset_rows
from services.data_server.settings import DataSettings
from services.data_server.task_sets import read_checks
from tests.tasks import write_task


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")
@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap")
def test_tasks_are_attempted_once_and_the_exit_code_says_whether_all_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENVIRONMENT_STEP_SECONDS", "300")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("one", "two"):
        write_task(tmp_path / name, {"instruction.md": f"Write 7 into value.txt, {name}."})
    write_task(tmp_path / "broken", {"solution/solve.sh": "#!/bin/sh\n"})
    attempted: list[str] = []
    check_task = tasks.check_task

    async def counted(harbor_tasks: Any, task: Any) -> Any:
        attempted.append(task.name)
        return await check_task(harbor_tasks, task)

    monkeypatch.setattr(tasks, "check_task", counted)

    def check(*, again: bool = False) -> int:
        attempted.clear()
        try:
            tasks.main(tasks.Action.CHECK, tmp_path, jobs=2, again=again)
        except typer.Exit as ended:
            return ended.exit_code
        return 0

    assert check() == 1
    assert sorted(attempted) == ["broken", "one", "two"]
    assert "its solution does not earn 1" in capsys.readouterr().out
    dataset = f"harbor:{tmp_path}"
    assert {record["task"]: record["passes"] for record in read_checks(dataset).values()} == {
        "one": True,
        "two": True,
        "broken": False,
    }
    rows = dataset_rows.load(DataSettings(dataset=dataset))
    assert (rows.rows, rows.refused) == (3, {"did not pass: its solution does not earn 1": 1})
    (tmp_path / "broken/solution/solve.sh").write_text("#!/bin/sh\necho 7 > /app/value.txt\n")
    assert check() == 0
    assert attempted == ["broken"]
    write_task(tmp_path / "run", {"environment/Dockerfile": "FROM a\nWORKDIR /app\nRUN make\n"})
    assert check() == 1
    assert attempted == []
    assert "1 RUN in its Dockerfile" in capsys.readouterr().out
