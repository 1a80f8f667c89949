"""The trainer's page knows where the run stands."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from services.core.endpoints import ENDPOINTS_VARIABLE, STATUS_PORT
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import InterruptedCallError
from services.run_page import progress
from tests.waiting import eventually
from trainer.checkpoints.state import RunState, note_accuracy
from trainer.config import TrainerSettings
from trainer.model.ranks import Ranks
from trainer.reporting.status import RunStatus, log_activity
from trainer.reporting.step_metrics import StepClock
from trainer.run import StopSignal, outcome_of, train


def test_the_reward_before_training_is_told_with_the_accuracy() -> None:
    state = RunState(model_type="qwen2", parameters=1)
    metrics = {"accuracy": 0.5, "accuracy_low": 0.1, "accuracy_high": 0.9, "eval_prompts": 4.0, "eval_left_out": 0.0}
    metrics["eval_reward"] = 0.75
    note_accuracy(TrainerSettings.load(), state, metrics)
    assert RunStatus(state=state).position()["eval_reward_before"] == 0.75
    state.step = 1
    note_accuracy(TrainerSettings.load(), state, metrics | {"eval_reward": 0.9})
    assert RunStatus(state=state).position()["eval_reward_before"] == 0.75


def test_every_moment_belongs_to_the_phase_that_was_entered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock()
    for at, phase in ((1.0, "fetch"), (3.0, "generate"), (10.0, "train")):
        now = at
        clock.enter(phase)
    clock.move(0.5, "score")
    now = 12.0
    assert clock.lap() == {
        "seconds_fetch": 2.0,
        "seconds_generate": 7.0,
        "seconds_score": 0.5,
        "seconds_train": 1.5,
        "seconds_step": 11.0,
    }
    now = 13.0
    assert clock.lap() == {"seconds_train": 1.0, "seconds_step": 1.0}


async def test_an_activity_that_goes_on_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    pause = asyncio.sleep
    monkeypatch.setattr("trainer.reporting.status.asyncio", SimpleNamespace(sleep=lambda _: pause(0)))
    status = RunStatus()
    status.begin("publish", "waiting for a worker")
    with structlog.testing.capture_logs() as lines:
        logging = asyncio.create_task(log_activity(status))
        await eventually(lambda: len(lines) > 1, "two lines")
        status.metrics = {"reward_mean": 1.0}  # after a step, a minute must pass
        told = len(lines)
        for _ in range(20):
            await pause(0)
        logging.cancel()
    assert len(lines) == told
    assert all(re.fullmatch(r"waiting for a worker, for \d s", line["event"]) for line in lines)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, "succeeded", None),
        (InterruptedCallError(), "interrupted", None),
        (DependencyLostError("reward-server: no answer"), "failed", "reward-server: no answer"),
        (ZeroDivisionError("of a step"), "failed", "ZeroDivisionError: of a step"),
    ],
)
def test_a_summary_says_why_the_run_failed(error: Exception | None, status: str, said: str | None) -> None:
    assert outcome_of(error) == {"status": status, "error": said}


def test_a_run_whose_page_has_no_port_ends_with_the_reason(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainerSettings.load(
        model_name=str(model), shared_dir=tmp_path, run_id="r", service_deadline_seconds=0.1, engine_start_seconds=0.1
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({f"ppo-trainer-0:{STATUS_PORT}": address}))
        with pytest.raises(ConfigurationError, match=f"cannot listen on {address}"):
            train(settings, alone, StopSignal())
