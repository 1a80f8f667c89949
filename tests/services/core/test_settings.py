"""Tests of services/core/settings.py."""

from __future__ import annotations

import pytest

from services.core.errors import ConfigurationError
from services.core.removed import REMOVED
from services.core.settings import Settings
from services.data_server.settings import DataSettings
from services.reward_server.settings import JudgeSettings


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


def test_a_removed_variable_is_refused_with_what_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REMOVED:
        with monkeypatch.context() as given:
            given.setenv(name, "")
            Settings.load()
            given.setenv(name, "1")
            with pytest.raises(ConfigurationError, match=name):
                Settings.load()


@pytest.mark.parametrize(
    ("name", "url", "is_allowed"),
    [
        ("JUDGE_URL", "http://user:s3cret@host/v1", False),
        ("JUDGE_URL", "https://s3cret@host/v1", False),
        ("JUDGE_URL", "htps://user:s3cret@host/v1", False),
        ("DATASET", "openenv+http://user:s3cret@host", False),
        ("DATASET", "http://one, http://user:s3cret@two", False),
        ("JUDGE_URL", "http://host/v1?at=a@b", True),
        ("JUDGE_URL", "http://host/@v1", True),
        ("DATASET", "curl https://user@host", True),
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str, is_allowed: bool
) -> None:
    class Both(JudgeSettings, DataSettings):
        pass

    monkeypatch.setenv(name, url)
    if is_allowed:
        Both.load()
        return
    with pytest.raises(ConfigurationError, match=name) as refusal:
        Both.load()
    assert "s3cret" not in str(refusal.value)
