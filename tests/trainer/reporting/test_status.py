"""The trainer's page knows where the run stands."""

from __future__ import annotations

from services.protocol.prompts import Cursor
from trainer.checkpoints.checkpoint import RunState
from trainer.reporting.status import RunStatus


def test_the_accuracy_before_training_is_told_as_soon_as_it_is_known() -> None:
    state = RunState(model_type="qwen2", parameters=1, cursor=Cursor())
    status = RunStatus(state=state)
    assert status.position()["accuracy_before"] is None
    state.accuracy_before = 0.5
    assert status.position()["accuracy_before"] == 0.5
