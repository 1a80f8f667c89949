"""Tests of services/core/settings.py."""

from __future__ import annotations

import pytest

from services.core.errors import ConfigurationError
from services.core.settings import Settings


def test_a_retired_variable_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SERVER_LISTEN_PORT", "")
    Settings.load()
    monkeypatch.setenv("REWARD_SERVER_LISTEN_PORT", "9000")
    with pytest.raises(ConfigurationError, match=r"REWARD_SERVER_LISTEN_PORT is no longer read: give --host and"):
        Settings.load()
