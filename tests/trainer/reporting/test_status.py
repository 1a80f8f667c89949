"""The trainer's page knows where the run stands."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE, STATUS_PORT
from services.core.errors import ConfigurationError
from services.protocol.prompts import Cursor
from trainer.checkpoints.checkpoint import RunState
from trainer.config import TrainerSettings
from trainer.model.ranks import Ranks
from trainer.reporting.status import RunStatus
from trainer.run import StopSignal, train


def test_the_accuracy_before_training_is_told_as_soon_as_it_is_known() -> None:
    state = RunState(model_type="qwen2", parameters=1, cursor=Cursor())
    status = RunStatus(state=state)
    assert status.position()["accuracy_before"] is None
    state.accuracy_before = 0.5
    assert status.position()["accuracy_before"] == 0.5


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
