"""Defaults of the trainer's settings that depend on others."""

from __future__ import annotations

import pytest

from trainer.config import TrainerSettings


@pytest.mark.parametrize(
    ("mode", "given", "is_in_place"),
    [("sync", None, False), ("async", None, True), ("sync", "true", True), ("async", "false", False)],
)
def test_the_asynchronous_mode_publishes_in_place_unless_told_otherwise(
    mode: str, given: str | None, is_in_place: bool
) -> None:
    assert TrainerSettings.load(mode=mode, publish_in_place=given).publishes_in_place is is_in_place


@pytest.mark.parametrize(("tokens", "seconds"), [(512, 600), (32_768, 3276.8)])
def test_long_completions_have_time_in_proportion(tokens: int, seconds: float) -> None:
    assert TrainerSettings.load(max_new_tokens=tokens).generation_deadline_seconds == seconds
