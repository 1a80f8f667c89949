from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.evaluation_head import app as app_module
from services.evaluation_head import discovery, driver, policies, registry
from services.evaluation_head.app import create_app
from services.evaluation_head.settings import HeadSettings
from tests.services.evaluation_head.policies import publish_lean, publish_times


@pytest.fixture(scope="session")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with version 3 of a policy that answers its state times 3. Not to be written to."""
    directory = tmp_path_factory.mktemp("times")
    publish_times(directory, 3)
    return directory


@pytest.fixture(scope="session")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a policy for CartPole-v1. Not to be written to."""
    directory = tmp_path_factory.mktemp("lean")
    publish_lean(directory)
    return directory


CONSTANTS = {
    "RELOAD_SECONDS": app_module,
    "MAX_WAITING": policies,
    "SILENT_SECONDS": registry,
    "IDLE_SECONDS": registry,
    "PROBE_INTERVAL_SECONDS": driver,
    "ENTRANCE_SECONDS": driver,
    "REQUEST_SECONDS": driver,
    "INTERVAL_SECONDS": discovery,
    "TIMEOUT_SECONDS": discovery,
    "ANSWER_SECONDS": policies,
}


@pytest.fixture
def head(times: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``head(head_batch_size=..., RELOAD_SECONDS=...)``: an evaluation head with those settings and constants."""

    def make(**options: Any) -> Any:
        for name in CONSTANTS.keys() & options.keys():
            monkeypatch.setattr(CONSTANTS[name], name, options.pop(name))
        settings = HeadSettings(**{"head_policies": f"times={times}", "head_timeout_ms": 1.0, **options})
        return create_app(settings)

    return make
