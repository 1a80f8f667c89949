"""A run's metrics at a tracker: each step once, in one curve, whatever happens to the run or the tracker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.core.errors import ConfigurationError
from trainer.config import TrainerSettings
from trainer.reporting.run_files import RunFiles
from trainer.reporting.trackers import RECORD, Tracker, tracker_of

STEPS = 6
NOT_EVALUATED = {"accuracy_before": None, "accuracy_after": None, "accuracy_after_step": None}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Settings of a run by tracker; variables that a tracker sets are gone after the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in [name for name in os.environ if name.startswith(("TRACKIO_", "WANDB_"))]:
        del os.environ[name]
    return lambda tracker: TrainerSettings.load(shared_dir=tmp_path, run_id="r", tracker=tracker, jobgroup_token="hush")


def run(settings: TrainerSettings, start: int, end: int, succeeded: bool) -> None:
    """Record the steps after ``start`` up to ``end``, as the trainer does after it has resumed at ``start``."""
    files = RunFiles(settings, start, str)
    for step in range(start + 1, end + 1):
        files.record_step(step, {"reward_mean": step / 10}, [])
    files.write_summary({"status": "succeeded" if succeeded else "failed", **NOT_EVALUATED})
    files.close()


def test_a_killed_and_resumed_run_is_one_straight_curve_in_trackio(settings: Any, tmp_path: Path) -> None:
    run(settings("trackio"), 0, 4, succeeded=False)
    run(settings("trackio"), 2, STEPS, succeeded=True)
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    assert len(Api().runs("grpo")) == 1
    logs = SQLiteStorage.get_logs("grpo", "r")
    assert [(one["step"], one["reward_mean"]) for one in logs] == [(step, step / 10) for step in range(1, STEPS + 1)]
    assert str(SQLiteStorage.get_project_db_path("grpo")).startswith(str(tmp_path / "trackio"))


class Unreachable:
    """A tracker's package that takes a run, and fails from its second step on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trainer.reporting.trackers.import_module", lambda _: self)

    def init(self, **_: Any) -> Unreachable:
        return self

    def log(self, _: Any, step: int) -> None:
        if step > 1:
            raise RuntimeError("lost")

    def finish(self) -> None:
        raise RuntimeError("lost")


def test_a_tracker_that_is_lost_in_mid_run_costs_its_points_and_not_the_run(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unreachable(monkeypatch)
    run(settings("trackio"), 0, 2, succeeded=True)
    lines = (tmp_path / "runs/r/metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == [1, 2]
    assert orjson.loads((tmp_path / "runs/r" / RECORD).read_bytes()) == {"tracker": "trackio", "step": 2}


def test_a_new_run_is_refused_where_no_run_can_begin_and_a_resumed_one_goes_on(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unreachable, "init", lambda _self, **_: 1 / 0)
    Unreachable(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"^TRACKER=trackio: no run could be begun there: .*TRACKER=none$"):
        Tracker(settings("trackio"))
    directory = tmp_path / "runs/r"
    directory.mkdir(parents=True)
    (directory / RECORD).write_text('{"tracker": "trackio", "step": 3}')
    run(settings("trackio"), 3, STEPS, succeeded=True)
    assert len((directory / "metrics.jsonl").read_bytes().splitlines()) == STEPS - 3


@pytest.mark.parametrize(
    ("tracker", "environment", "name"),
    [("auto", {}, ""), ("auto", {"WANDB_API_KEY": "k"}, "wandb"), ("none", {"WANDB_API_KEY": "k"}, "")],
)
def test_auto_is_wandb_where_it_has_a_key(settings: Any, tracker: str, environment: dict[str, str], name: str) -> None:
    os.environ |= environment
    assert tracker_of(settings(tracker)) == name


def test_what_a_tracker_lacks_is_said(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.reporting.trackers.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"install 'skypilot-grpo\[trackio\]'"):
        tracker_of(settings("trackio"))
