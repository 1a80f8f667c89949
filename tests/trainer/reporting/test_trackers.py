"""A run's metrics at a tracker: each step once, in one curve, whatever happens to the run or the tracker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.core.errors import ConfigurationError
from tests.fake_service import FakeService, fake_service
from trainer.config import TrainerSettings
from trainer.reporting.run_files import RunFiles
from trainer.reporting.trackers import RECORD, Tracker, tracker_of

STEPS = 6
NOT_EVALUATED = {"accuracy_before": None, "accuracy_after": None, "accuracy_after_step": None}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Settings of a run by tracker; variables that a tracker sets are gone after the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in [name for name in os.environ if name.startswith(("TRACKIO_", "MLFLOW_", "WANDB_"))]:
        del os.environ[name]
    return lambda tracker: TrainerSettings.load(shared_dir=tmp_path, run_id="r", tracker=tracker, jobgroup_token="hush")


def run(settings: TrainerSettings, start: int, end: int, succeeded: bool) -> None:
    """Record the steps after ``start`` up to ``end``, as the trainer does after it has resumed at ``start``."""
    files = RunFiles(settings, start, str)
    for step in range(start + 1, end + 1):
        files.record_step(step, {"reward_mean": step / 10}, [])
    files.write_summary({"status": "succeeded" if succeeded else "failed", **NOT_EVALUATED})
    files.close()


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[tuple[FakeService, list[dict[str, Any]]]]:
    """A server with MLflow's routes, and the bodies of the requests to it."""
    bodies: list[dict[str, Any]] = []

    def route(name: str, answer: Any) -> Any:
        def respond(body: dict[str, Any]) -> Any:
            bodies.append({"route": name, **body})
            return answer

        return respond

    info = {"run_id": "abc", "run_uuid": "abc", "experiment_id": "7", "status": "RUNNING", "artifact_uri": "file:///x"}
    posts = {
        "experiments/create": {"experiment_id": "7"},
        "runs/create": {"run": {"info": info, "data": {}}},
        "runs/update": {"run_info": info},
        "runs/log-batch": {},
    }
    routes = {f"POST /api/2.0/mlflow/{name}": route(name, answer) for name, answer in posts.items()}
    missing = (404, orjson.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no"}).decode(), {})
    routes["GET /api/2.0/mlflow/experiments/get-by-name"] = lambda _: missing
    routes["GET /api/2.0/mlflow/runs/get"] = lambda _: {"run": {"info": info, "data": {}}}
    with fake_service(routes) as service:
        os.environ["MLFLOW_TRACKING_URI"] = service.endpoint.url
        yield service, bodies


def test_a_killed_and_resumed_run_is_one_straight_curve_at_mlflow(settings: Any, mlflow: Any) -> None:
    _, bodies = mlflow
    run(settings("mlflow"), 0, 4, succeeded=False)
    run(settings("mlflow"), 2, STEPS, succeeded=True)  # from a checkpoint two steps before the kill
    assert [body["route"] for body in bodies].count("runs/create") == 1
    points = [m for body in bodies if body["route"] == "runs/log-batch" for m in body.get("metrics", [])]
    rewards = [(m["step"], m["value"]) for m in points if m["key"] == "reward_mean"]
    assert sorted(rewards) == [(step, step / 10) for step in range(1, STEPS + 1)]
    ends = [body.get("status") for body in bodies if body["route"] == "runs/update"]
    assert ends == ["FAILED", "RUNNING", "FINISHED"]
    assert "hush" not in str(bodies)


def test_a_killed_and_resumed_run_is_one_straight_curve_in_trackio(settings: Any, tmp_path: Path) -> None:
    run(settings("trackio"), 0, 4, succeeded=False)
    run(settings("trackio"), 2, STEPS, succeeded=True)
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    assert len(Api().runs("grpo")) == 1
    logs = SQLiteStorage.get_logs("grpo", "r")
    assert [(one["step"], one["reward_mean"]) for one in logs] == [(step, step / 10) for step in range(1, STEPS + 1)]
    assert str(SQLiteStorage.get_project_db_path("grpo")).startswith(str(tmp_path / "trackio"))


def test_a_tracker_that_is_lost_in_mid_run_costs_its_points_and_not_the_run(
    settings: Any, mlflow: Any, tmp_path: Path
) -> None:
    service, _ = mlflow
    files = RunFiles(settings("mlflow"), 0, str)
    files.record_step(1, {"reward_mean": 0.1}, [])
    service.routes["POST /api/2.0/mlflow/runs/log-batch"] = lambda _: 400
    files.record_step(2, {"reward_mean": 0.2}, [])
    files.write_summary({"status": "succeeded", **NOT_EVALUATED})
    files.close()
    lines = (tmp_path / "runs/r/metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == [1, 2]
    assert orjson.loads((tmp_path / "runs/r" / RECORD).read_bytes()) == {"tracker": "mlflow", "id": "abc", "step": 2}


def test_a_new_run_is_refused_where_no_run_can_begin_and_a_resumed_one_goes_on(settings: Any, tmp_path: Path) -> None:
    os.environ |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with pytest.raises(ConfigurationError, match=r"^TRACKER=mlflow: no run could be begun there: .*set TRACKER=none$"):
        Tracker(settings("mlflow"))
    directory = tmp_path / "runs/r"
    directory.mkdir(parents=True)
    (directory / RECORD).write_text('{"tracker": "mlflow", "id": "abc", "step": 3}')
    run(settings("mlflow"), 3, STEPS, succeeded=True)
    assert len((directory / "metrics.jsonl").read_bytes().splitlines()) == STEPS - 3


@pytest.mark.parametrize(
    ("tracker", "environment", "name"),
    [("auto", {}, ""), ("auto", {"WANDB_API_KEY": "k"}, "wandb"), ("none", {"WANDB_API_KEY": "k"}, "")],
)
def test_auto_is_wandb_where_it_has_a_key(settings: Any, tracker: str, environment: dict[str, str], name: str) -> None:
    os.environ |= environment
    assert tracker_of(settings(tracker)) == name


def test_what_a_tracker_lacks_is_said(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="needs the address of a server in MLFLOW_TRACKING_URI"):
        tracker_of(settings("mlflow"))
    monkeypatch.setattr("trainer.reporting.trackers.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"install 'skypilot-grpo\[trackio\]'"):
        tracker_of(settings("trackio"))
