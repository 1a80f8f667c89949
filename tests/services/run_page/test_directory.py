"""Run directories are read part by part, also while the trainer writes them and after it was resumed."""

import os

import orjson
import pytest

from services.core.errors import ConfigurationError
from services.run_page.directory import FIRST_FAILURE, Run, find_runs
from services.run_page.records import RECORDS_A_REPLY, Position, read_metrics
from tests.services.run_page.runs import append, metrics, write_run


def steps_of(columns):
    return [int(step) for step in columns.columns.get("step", [])]


def read_all(run, start):
    steps, restarts = [], 0
    while True:
        read = read_metrics(run.path / "metrics.jsonl", start)
        if read.restarted:
            restarts += 1
            steps = []
        steps += steps_of(read)
        start = Position(read.file, read.offset)
        if not read.more:
            return steps, restarts, start


def test_each_step_is_read_once_as_the_file_grows(tmp_path):
    run = Run(write_run(tmp_path / "run", 3))
    steps, _, end = read_all(run, Position())
    assert steps == [1, 2, 3]
    append(run.path / "metrics.jsonl", [metrics(4)])
    steps, restarts, end = read_all(run, end)
    assert (steps, restarts) == ([4], 0)
    assert read_all(run, end)[0] == []


def test_a_long_run_comes_in_parts(tmp_path):
    run = Run(write_run(tmp_path / "run", 2 * RECORDS_A_REPLY))
    first = read_metrics(run.path / "metrics.jsonl", Position())
    assert first.more
    assert len(steps_of(first)) == RECORDS_A_REPLY
    assert read_all(run, Position(first.file, first.offset))[0] == list(
        range(RECORDS_A_REPLY + 1, 2 * RECORDS_A_REPLY + 1)
    )


def test_a_line_that_is_being_written_waits(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    _, _, end = read_all(run, Position())
    line = orjson.dumps(metrics(2)) + b"\n"
    with (run.path / "metrics.jsonl").open("ab", buffering=0) as stream:
        stream.write(line[:20])
        assert steps_of(read_metrics(run.path / "metrics.jsonl", end)) == []
        stream.write(line[20:])
    assert steps_of(read_metrics(run.path / "metrics.jsonl", end)) == [2]


def test_a_resumed_run_is_read_from_its_start_again(tmp_path):
    run = Run(write_run(tmp_path / "run", 9))
    _, _, end = read_all(run, Position())
    # As the trainer does when it drops the steps after its checkpoint.
    partial = run.path / ".metrics.partial"
    append(partial, [metrics(step) for step in range(1, 6)])
    os.rename(partial, run.path / "metrics.jsonl")
    append(run.path / "metrics.jsonl", [metrics(step) for step in range(6, 30)])
    steps, restarts, _ = read_all(run, end)
    assert restarts == 1
    assert steps == list(range(1, 30))


def test_what_a_step_lacks_or_is_not_finite_is_none(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    (run.path / "metrics.jsonl").write_text(
        '{"step":1,"loss":0.123456789}\n{"step":2,"accuracy":0.5}\n{"step":3,"loss":null}\n'
    )
    columns = read_metrics(run.path / "metrics.jsonl", Position()).columns
    assert columns["loss"] == [0.123457, None, None]
    assert columns["accuracy"] == [None, 0.5, None]


def test_the_counts_of_a_steps_rewards_come_beside_its_metrics(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    append(run.path / "metrics.jsonl", [{"step": 2, "failures": [["limit", 1, "had its 2 turns"]]}])
    read = read_metrics(run.path / "metrics.jsonl", Position())
    assert read.reward_counts == [[[0.0, 20], [1.0, 12]], None]
    assert not {"reward_counts", "failures"} & read.columns.keys()


def test_broken_lines_and_counts_are_left_out(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    broken = ['{"step":null}', '{"st', "[1]", "\0\0"]
    lines = [*broken, '{"step":1,"reward_counts":"many"}', '{"step":2,"reward_counts":[[1,2],[3]]}']
    (run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    read = read_metrics(run.path / "metrics.jsonl", Position())
    assert (steps_of(read), read.unreadable, read.reward_counts) == ([1, 2], 4, [None, [[1, 2]]])


def test_a_damaged_file_is_named_and_counts_as_empty(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    (run.path / "config.json").write_text("[]")
    (run.path / "summary.json").write_bytes(b"\xff{")
    overview = run.overview()
    assert (overview.components, overview.summary) == ({}, {})
    assert [damage.split()[0] for damage in overview.damaged] == ["config.json", "summary.json"]


def test_a_run_that_has_just_begun_is_empty(tmp_path):
    run = Run(tmp_path / "not-there-yet")
    overview = run.overview()
    assert (overview.components, overview.summary, overview.damaged, overview.written) == ({}, {}, [], None)
    assert overview.first_failure == ""
    assert read_metrics(run.path / "metrics.jsonl", Position()).columns == {}
    write_run(run.path, 1)
    assert read_all(run, Position())[0] == [1]
    (run.path / FIRST_FAILURE).write_text("exception: KeyError (mine.py, line 3, in agent)\n")
    assert run.overview().first_failure == "exception: KeyError (mine.py, line 3, in agent)"
    (run.path / FIRST_FAILURE).write_text("x" * 5_000_000)
    assert 100_000 < len(run.overview().first_failure) < 101_000


def test_a_run_has_its_steps_once_and_its_findings_once_there_are_some(tmp_path):
    lines = [metrics(step) | {"trained_tokens": 0.0, "reward_counts": [[0.0, 8]]} for step in range(1, 6)]
    run = Run(write_run(tmp_path / "run", 0))
    (run.path / "summary.json").unlink()
    for count, is_early in ((1, True), (2, True), (5, False)):
        append(run.path / "metrics.jsonl", lines[len(run.steps()) : count])
        assert [step["step"] for step in run.steps()] == [*range(1, count + 1)]
        assert (run.overview().findings == []) is is_early
    # As a trainer does that resumes from a checkpoint.
    append(run.path / ".partial", lines[:3])
    (run.path / ".partial").rename(run.path / "metrics.jsonl")
    assert [step["step"] for step in run.steps()] == [1, 2, 3]
    [found] = run.overview().findings
    assert (found["rule"], found["first_step"], found["last_step"]) == ("nothing learned", 1, 3)
    assert run.overview(is_alone=False).findings == []


def test_runs_are_found_and_told_apart(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / "runs" / name, 1)
    (tmp_path / "runs" / "notes").mkdir()
    assert [run.name for run in find_runs([str(tmp_path / "runs")])] == ["a", "b"]
    paths = [str(write_run(tmp_path / volume / "grpo-1", 1)) for volume in ("one", "two")]
    assert [run.name for run in find_runs([*paths, paths[0]])] == ["one/grpo-1", "two/grpo-1"]
    for no_run in ("nowhere", "runs/notes"):
        with pytest.raises(ConfigurationError, match=no_run):
            find_runs([str(tmp_path / no_run)])
