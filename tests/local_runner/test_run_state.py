"""One rule says what state a run is in, from its runner, its files and their age."""

import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from local_runner import directory
from local_runner.run_state import error_of, last_error, state_of

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
    assert state_of(make(tmp_path / "run", days=days, nodes=nodes, runner=runner, summary=status)) == state


def test_a_failed_run_has_the_error_of_the_node_that_failed(tmp_path):
    failed = FAILED | {"reason": "ppo-trainer failed with exit code 78"}
    summary = {"status": "failed", "error": "of the summary"}
    run = make(tmp_path / "run", nodes=HERE, runner=failed, summary=summary)
    assert error_of(run) == "ppo-trainer failed with exit code 78: of the summary"
    (run / "logs").mkdir()
    for node, said in (("data-server-0", "another"), ("ppo-trainer-0", "of the node")):
        (run / "logs" / f"{node}.log").write_text(f"=== one ===\nerror: older\n=== two ===\nerror: {said}\nlast line\n")
    assert error_of(run) == "ppo-trainer failed with exit code 78: of the node"
    (run / "logs/ppo-trainer-0.log").write_text("=== one ===\nTraceback\n")
    (run / "summary.json").unlink()
    assert error_of(run) == "ppo-trainer failed with exit code 78; see logs/ppo-trainer-0.log"


@pytest.mark.parametrize(
    ("runner", "summary", "error"),
    [
        (None, {"status": "failed", "error": "no worker"}, "no worker"),
        (None, {"status": "failed"}, None),  # of an earlier release
        (None, None, None),
        (DONE, {"status": "failed", "error": "of an earlier attempt"}, None),
        (STOPPED, {"status": "interrupted", "error": None}, None),
        ({"exit_code": "?"}, None, None),
        ([1], None, None),
    ],
)
def test_other_runs_have_the_error_of_their_summary_or_none(tmp_path, runner, summary, error):
    assert error_of(make(tmp_path / "run", nodes=HERE, runner=runner, summary=summary)) == error


def test_the_last_error_is_found_in_a_long_log(tmp_path):
    log = tmp_path / "long.log"
    log.write_text("=== start ===\n" + "noise\n" * 200_000 + "error: the reason\n")
    assert last_error(log) == "error: the reason"


def test_a_live_runner_counts_more_than_what_an_earlier_attempt_left(tmp_path):
    process = HERE | {"pid": os.getpid(), "started": psutil.Process().create_time()}
    run = make(tmp_path / "run", days=7, nodes=process, summary={"status": "succeeded"})
    assert state_of(run) == "running"


def test_the_lock_shows_a_runner_in_another_container(tmp_path):
    run = make(tmp_path / "run", days=7, nodes=ELSEWHERE, summary={"status": "succeeded"})
    with directory.locked(run):
        assert state_of(run) == "running"
    assert state_of(run) == "succeeded"


def test_a_damaged_file_or_a_removed_run_makes_the_state_unknown(tmp_path):
    assert state_of(tmp_path / "removed").startswith("unknown: ")
    run = make(tmp_path / "run", nodes=HERE)
    (run / "summary.json").write_text("{")
    assert state_of(run).startswith("unknown: ")
