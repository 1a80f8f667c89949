"""Runs are listed with their sizes and removed on demand, unless they are or may be under way."""

import json
import os
import shutil
import socket
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from local_runner import clean
from services.core.errors import exit_code_of
from services.run_page.directory import Run, all_runs

DAY = 86_400
GONE = {"pid": 1, "started": 0.0, "endpoints": {}, "machine": socket.gethostname()}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def make(name: str, *, days: float = 0, megabytes: int = 1, nodes=GONE, status: str | None = "succeeded") -> Path:
    """Make a run below runs/ that ended so many days ago; without ``nodes`` as a cluster leaves it."""
    run = Path("runs") / name
    (run / "model").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "model" / "weights").write_bytes(bytes(megabytes * 1_000_000))
    if nodes is not None:
        (run / "nodes.json").write_text(json.dumps(nodes))
        (run / "runner.lock").touch()
    if status is not None:
        (run / "summary.json").write_text(json.dumps({"status": status}))
    when = time.time() - days * DAY
    for path in [*run.rglob("*"), run]:
        os.utime(path, (when, when))
    return run


def call(*names: str, **options) -> int:
    return exit_code_of(lambda: clean.main(list(names) or None, **options))


def test_without_arguments_runs_are_listed_and_stay(capfd):
    make("older", days=3, megabytes=2)
    make("newer", status="failed")
    linked = Path("runs/newer/policy")
    linked.hardlink_to("runs/newer/model/weights")
    assert call() == 0
    said = capfd.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["newer", "failed", "1.0", "MB"] in [line[:4] for line in lines]
    assert ["older", "succeeded", "2.0", "MB", "3d", "ago"] in lines
    assert "number of runs: 2, size: 3.0 MB" in said
    assert [run.name for run in all_runs()] == ["newer", "older"]


def test_runs_are_removed_by_id_and_by_directory(here):
    for name in ("one", "two", "three"):
        make(name)
    assert call("one", str(here / "runs" / "two")) == 0
    assert [run.name for run in all_runs()] == ["three"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep": 2}, ["new", "day"]),
        ({"keep": 0}, []),
    ],
)
def test_all_but_the_newest_ones_are_removed(options, left):
    for name, days in (("new", 0), ("day", 1), ("week", 7)):
        make(name, days=days)
    assert call(**options) == 0
    assert [run.name for run in all_runs()] == left


ELSEWHERE = GONE | {"machine": "another-machine"}


HERE = GONE | {"pid": os.getpid(), "started": psutil.Process().create_time()}


def test_a_run_that_is_or_may_be_under_way_is_never_removed(capfd):
    for number, (nodes, days, is_locked, said) in enumerate(
        (
            (HERE, 7, False, f"its runner is process {os.getpid()}"),
            (ELSEWHERE, 7, True, "its runner holds runner.lock"),
            (ELSEWHERE, 0.2, False, "it may still run"),
            (None, 0.2, False, "it may still run"),
            (None, 2, False, None),
        )
    ):
        run = make(name := f"run{number}", days=days, nodes=nodes)
        with Run(run).locked() if is_locked else nullcontext():
            code, error = call(name), capfd.readouterr().err
            assert (code, (said or "") in error) == (78 if said else 0, True), error
            assert call(keep=0) == 0
            assert (f"runs/{name} is not removed" in capfd.readouterr().out) == bool(said)
            assert run.exists() == bool(said)
        shutil.rmtree(run, ignore_errors=True)


def test_other_directories_are_never_removed(here, capfd):
    make("run")
    model = here / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("my-model", "runs", "..", "absent"):
        assert call("run", name) == 78
        assert f"{name} is neither a run below runs/ here nor the directory of one" in capfd.readouterr().err
    assert model.exists()
    assert [run.name for run in all_runs()] == ["run"]


def test_a_run_keeps_its_model_and_records_without_what_resumes_it(capfd):
    for name in ("one", "unfinished"):
        run = make(name, megabytes=2)
        for part in ("checkpoints/step-1", "policy/v1"):
            (run / part).mkdir(parents=True)
            (run / part / "file").write_bytes(bytes(3_000_000))
    Path("runs/one/groups").mkdir()
    Path("runs/one/groups/step-000001").write_bytes(bytes(2_000_000))
    (Path("runs/unfinished/model/weights")).unlink()
    Path("runs/unfinished/model").rmdir()
    before = {path for path in Path("runs").rglob("*") if not {"checkpoints", "policy"} & set(path.parts)}
    assert call(keep=0, keep_model=True) == 0
    said = capfd.readouterr().out
    assert "removed checkpoints and policy of runs/one, 6.0 MB\n" in said
    assert "runs/unfinished is not removed: it has no model/" in said
    left = {path for path in Path("runs").rglob("*") if not {"checkpoints", "policy"} & set(path.parts)}
    assert left == before
    assert not Path("runs/one/checkpoints").exists()
    assert not Path("runs/one/policy").exists()
    assert Path("runs/unfinished/checkpoints/step-1/file").exists()
    assert call("unfinished", keep_model=True) == 78


def test_keep_model_without_runs_says_how_to_name_them(capfd):
    run = make("one")
    (run / "policy").mkdir()
    assert call(keep_model=True) == 78
    assert "give --keep 0 for all" in capfd.readouterr().err
    assert (run / "policy").exists()
