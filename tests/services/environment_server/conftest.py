from __future__ import annotations

from typing import Any

import pytest

from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings

ODD = "tests.services.environment_server.odd_environments:Odd/"


@pytest.fixture
def app() -> Any:
    """``app(environment=..., ...)``: an environment server with those settings."""

    def make(**options: Any) -> Any:
        return create_app(EnvironmentSettings(**{"environment_server_name": "test-server", **options}))

    return make
