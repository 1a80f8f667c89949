"""``grpo doctor``: what this machine can do."""

from __future__ import annotations

import pytest

from services.sandbox.kernel import landlock_version
from tests.local_runner.in_process import call


def test_it_shows_what_this_machine_can_do(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert call("doctor") == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "│" in line]
    rows = {subject.strip(): (state.strip(), facts) for _, subject, state, facts, _ in (x.split("│") for x in lines)}
    assert {"system", "memory", "disk", "GPUs", "engine", "sandbox bwrap", "sandbox landlock"} <= set(rows)
    if landlock_version():
        assert rows["sandbox landlock"][0] == "yes"
