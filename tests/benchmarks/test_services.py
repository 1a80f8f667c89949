"""The load of environment-servers: each episode is played to its end, by one client or by many."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import services
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from tests.services.run_page.serving import served_ready

pytestmark = pytest.mark.leaving


@pytest.mark.parametrize("environment", services.ENVIRONMENTS)
@pytest.mark.parametrize("clients", [1, 4])
def test_every_episode_is_played_to_its_end(environment: str, clients: int) -> None:
    act = services.ENVIRONMENTS[environment]
    with served_ready(create_app(EnvironmentSettings(environment=environment))) as url:
        load, seconds = asyncio.run(services.play(int(url.rpartition(":")[2]), act, clients, 4, 6))
    assert load.steps >= 6
    assert len(load.milliseconds) == load.steps if clients == 4 else len(load.milliseconds) < load.steps
    assert seconds > 0
