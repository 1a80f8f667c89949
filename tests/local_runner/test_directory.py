"""One rule says what state a run is in, from its runner, its files and their age."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from local_runner import clean, status
from scripts import chat, view
from services.core.errors import EXIT_CONFIGURATION, exit_code_of
from services.run_page.directory import RUNNING, Run, find_run


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """Two runs below runs/, and one elsewhere."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("runs/newer", "runs/older", "volume/runs/other")):
        run = tmp_path / name
        (run / "logs").mkdir(parents=True)
        (run / "logs" / "ppo-trainer-0.log").write_text(f"trainer of {run.name}\n")
        (run / "logs" / "data-server-0.log").write_text(f"data of {run.name}\n")
        (run / "metrics.jsonl").write_text("")
        when = time.time() - 60 * age
        for path in [*run.rglob("*"), run]:
            os.utime(path, (when, when))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "runs/newer"),
        ("older", "runs/older"),
        ("runs/older", "runs/older"),
        ("volume/runs/other", "volume/runs/other"),
    ],
)
def test_a_run_is_named_by_id_or_directory_and_is_the_newest_by_default(given, found):
    assert find_run(given).path == Path(found)


def shown(capfd, *names: str, **options) -> list[str]:
    status.logs(list(names) or None, **options)
    return capfd.readouterr().out.splitlines()


def test_logs_are_of_a_run_and_of_tasks(capfd):
    assert shown(capfd, "ppo-trainer") == ["trainer of newer"]
    assert shown(capfd, "older", "data-server-0") == ["data of older"]
    assert shown(capfd, "volume/runs/other", "ppo-trainer") == ["trainer of other"]
    assert len(shown(capfd, "older")) == len(shown(capfd)) == 2


def test_following_shows_nodes_that_start_later(tmp_path, monkeypatch):
    directory = tmp_path / "logs"

    def advance():
        directory.mkdir()
        (directory / "data-server-0.log").write_text("2026-01-01T00:00:01 one\n")
        yield RUNNING
        (directory / "ppo-trainer-0.log").write_text("2026-01-01T00:00:02 two\n")
        yield "succeeded"

    states = advance()
    monkeypatch.setattr(Run, "state", property(lambda _: next(states)))
    monkeypatch.setattr(status, "POLL_SECONDS", 0)
    console = Console(file=io.StringIO(), width=100)
    status.show_logs(console, Run(tmp_path), [], last=None, follow=True)
    shown = console.file.getvalue().splitlines()
    assert shown == ["2026-01-01T00:00:01 one", "ppo-trainer-0 │ 2026-01-01T00:00:02 two"]


@pytest.mark.parametrize(
    "named",
    [
        lambda: status.main("oldest", token=None),
        lambda: status.logs(["oldest"]),
        lambda: view.main(["newer", "oldest"]),
        lambda: clean.main(["oldest"]),
        lambda: chat.main("oldest"),
    ],
    ids=["status", "logs", "view", "clean", "chat"],
)
def test_every_command_says_in_one_line_which_runs_there_are(capfd, named):
    assert exit_code_of(named) == EXIT_CONFIGURATION
    [line] = capfd.readouterr().err.splitlines()
    assert "oldest" in line
    assert line.endswith(": newer, older")


HERE = {"pid": 1, "started": 0.0, "endpoints": {}, "machine": socket.gethostname()}
ELSEWHERE = HERE | {"machine": "another-machine"}
DONE = {"exit_code": 0, "failed": None}
STOPPED = {"exit_code": 130, "failed": None}
FAILED = {"exit_code": 78, "failed": "ppo-trainer-0"}


def make(run: Path, *, days: float = 0, **files: object) -> Path:
    """Make a run that has a step and ``files``, each given by its name without .json."""
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    for name, content in files.items():
        if content is not None:
            (run / f"{name}.json").write_text(json.dumps(content))
    when = time.time() - days * 86_400
    for path in [*run.iterdir(), run]:
        os.utime(path, (when, when))
    return run


@pytest.mark.parametrize(
    ("nodes", "runner", "summary", "days", "state"),
    [
        (HERE, DONE, "succeeded", 0, "succeeded"),
        (HERE, STOPPED, "interrupted", 0, "interrupted"),
        (HERE, FAILED, None, 0, "failed"),  # before the trainer could write a summary
        (HERE, FAILED, "succeeded", 0, "failed"),  # the summary is of an earlier attempt
        (HERE, None, None, 0, "ended without a summary"),  # the runner was killed
        (HERE, None, "succeeded", 0, "succeeded"),  # the runner was killed when the trainer had ended
        (ELSEWHERE, None, None, 0.5, "may be under way"),
        (ELSEWHERE, None, None, 2, "ended without a summary"),
        (None, None, None, 0.5, "may be under way"),
        (None, None, None, 2, "ended without a summary"),
        (None, None, "failed", 0, "failed"),
    ],
)
def test_a_run_without_a_live_runner(tmp_path, nodes, runner, summary, days, state):
    status = summary and {"status": summary}
    assert Run(make(tmp_path / "run", days=days, nodes=nodes, runner=runner, summary=status)).state == state


def test_a_failed_run_has_the_error_of_the_node_that_failed(tmp_path):
    failed = FAILED | {"reason": "ppo-trainer failed with exit code 78"}
    summary = {"status": "failed", "error": "of the summary"}
    run = make(tmp_path / "run", nodes=HERE, runner=failed, summary=summary)
    assert Run(run).error == "ppo-trainer failed with exit code 78: of the summary"
    (run / "logs").mkdir()
    for node, said in (("data-server-0", "another"), ("ppo-trainer-0", "of the node")):
        (run / "logs" / f"{node}.log").write_text(f"=== one ===\nerror: older\n=== two ===\nerror: {said}\nlast line\n")
    assert Run(run).error == "ppo-trainer failed with exit code 78: of the node"
    (run / "logs/ppo-trainer-0.log").write_text("=== one ===\nTraceback\n")
    (run / "summary.json").unlink()
    assert Run(run).error == "ppo-trainer failed with exit code 78; see logs/ppo-trainer-0.log"


@pytest.mark.parametrize(
    ("runner", "summary", "error"),
    [
        (None, {"status": "failed", "error": "no worker"}, "no worker"),
        (None, {"status": "failed"}, None),
        (None, None, None),
        (DONE, {"status": "failed", "error": "of an earlier attempt"}, None),
        (STOPPED, {"status": "interrupted", "error": None}, None),
        ({"exit_code": "?"}, None, None),
        ([1], None, None),
    ],
)
def test_other_runs_have_the_error_of_their_summary_or_none(tmp_path, runner, summary, error):
    assert Run(make(tmp_path / "run", nodes=HERE, runner=runner, summary=summary)).error == error


def test_the_last_error_is_found_in_a_long_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/long.log").write_text("=== start ===\n" + "noise\n" * 200_000 + "error: the reason\n")
    assert Run(tmp_path).last_error("long") == "error: the reason"


def test_a_live_runner_counts_more_than_what_an_earlier_attempt_left(tmp_path):
    process = HERE | {"pid": os.getpid(), "started": psutil.Process().create_time()}
    run = make(tmp_path / "run", days=7, nodes=process, summary={"status": "succeeded"})
    assert Run(run).state == "running"


def test_the_lock_shows_a_runner_in_another_container(tmp_path):
    run = make(tmp_path / "run", days=7, nodes=ELSEWHERE, summary={"status": "succeeded"})
    with Run(run).locked():
        assert Run(run).state == "running"
    assert Run(run).state == "succeeded"


def test_a_damaged_file_or_a_removed_run_makes_the_state_unknown(tmp_path):
    assert Run(tmp_path / "removed").state.startswith("unknown: ")
    run = make(tmp_path / "run", nodes=HERE)
    (run / "summary.json").write_text("{")
    assert Run(run).state.startswith("unknown: ")
