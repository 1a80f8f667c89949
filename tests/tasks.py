"""Tasks in Harbor's format, written for a test."""

from __future__ import annotations

import json
from pathlib import Path

from services.data_server.task_sets import checks_file, read_tasks

TASKS = Path(__file__).parents[1] / "examples/tasks"
TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
TEST = """#!/bin/sh
cd /app
if python3 /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, files: dict[str, str] | None = None) -> Path:
    """Write a task and return its directory; ``files`` replace those of a task about /app/value.txt."""
    written = {
        "task.toml": TOML,
        "instruction.md": "Write 7 into `/app/value.txt`.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
        "solution/solve.sh": "#!/bin/sh\necho 7 > /app/value.txt\n",
        "tests/check.py": 'assert open("/app/value.txt").read().strip() == "7"\n',
        "tests/test.sh": TEST,
        **(files or {}),
    }
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    return folder


def pass_checks(folder: Path) -> None:
    """Write what `grpo tasks check` writes of tasks that pass."""
    dataset = f"harbor:{folder}"
    records = [{"digest": task.digest, "passes": True} for task in read_tasks(dataset)[0].values()]
    checks_file(dataset).write_text("".join(json.dumps(record) + "\n" for record in records))
