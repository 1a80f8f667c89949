"""Commands that read a run whose files are damaged end with exit code 78 and one line that names the file."""

import json
import socket
from pathlib import Path

import pytest

from tests.local_runner.in_process import call

FILES = {
    "config.json": {"components": {"ppo-trainer": {"settings": {}}}},
    "launch.json": {"directory": "/", "job_group": "jobgroup.yaml", "env_files": [], "in_files": {}},
    "nodes.json": {"pid": 1, "started": 0.0, "endpoints": {}, "machine": socket.gethostname()},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    for name, content in FILES.items():
        (run / name).write_text(json.dumps(content))
    (run / "checkpoints/step-000001").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    return run


FORK = ("fork", "mine", "--at", "1", "--dry-run")
PREPARE = (*FORK[:-1], "--prepare")
DAMAGES = [
    *((PREPARE, "metrics.jsonl", content) for content in ("{bad}\n", "[1]\n", '{"stop": 1}\n')),
    *(
        (FORK, "config.json", content)
        for content in ('{"comp', "[]", '{"components": 3}', '{"components": {"ppo-trainer": 1}}')
    ),
    *((FORK, "launch.json", content) for content in ('{"dir', "3", '{"directory": 1}', '{"env_files": []}')),
    *((("status", "mine"), "nodes.json", content) for content in ("", "[]", '{"pid": 1}', '{"pid": 1, "later": 2}')),
    *((("status", "mine"), "metrics.jsonl", content) for content in ("{bad}\n", '{"stop": 1}\n', '{"step": "x"}\n')),
]


@pytest.mark.parametrize(("command", "file", "content"), DAMAGES)
def test_a_damaged_file_is_named(
    run: Path, capfd: pytest.CaptureFixture[str], command: tuple[str, ...], file: str, content: str
) -> None:
    (run / file).write_text(content)
    assert call(*command) == 78
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert file in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["-rf", "../../etc", "a/b", "a\nb", "x" * 81])
def test_a_fork_has_a_name_that_is_a_runs(run: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    assert call(*FORK, f"--run-id={name}") == 78
    assert "--run-id" in capfd.readouterr().err
