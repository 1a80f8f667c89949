"""Tests of services/core/settings.py."""

from __future__ import annotations

import pytest

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings


@pytest.mark.parametrize(
    ("text", "message"), [("nonsense", "CHAT_TEMPLATE_ARGS is 'nonsense': give JSON"), ("[1]", "dictionary")]
)
def test_a_setting_that_is_a_json_object_is_read_and_anything_else_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("CHAT_TEMPLATE_ARGS", '{"enable_thinking": false, "names": ["a"]}')
    assert DataSettings.load().chat_template_args == {"enable_thinking": False, "names": ["a"]}
    monkeypatch.setenv("CHAT_TEMPLATE_ARGS", text)
    with pytest.raises(ConfigurationError, match=message):
        DataSettings.load()
