"""Fixtures of the local runner's tests."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from tests.local_runner.in_process import answer


@pytest.fixture
def asks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process what a dry run asks other processes: imports of functions, rows, memory."""
    monkeypatch.setattr("local_runner.checks.subprocess", SimpleNamespace(**vars(subprocess) | {"run": answer}))
