"""A server made with OpenEnv 0.10's package; `make test-openenv` runs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from tests.ports import free_port
from tests.services.conftest import serving as serving  # a fixture
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until

pytestmark = pytest.mark.openenv

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("OPENENV_PYTHON", ROOT / ".venv-openenv/bin/python"))


@pytest.fixture(autouse=True)
def package() -> None:
    if not PYTHON.exists():
        pytest.skip(f"no openenv at {PYTHON}; `make test-openenv` installs it")


def server(environment: str) -> Any:
    return create_app(EnvironmentSettings(environment=environment, environment_server_name="test-server"))


@pytest.fixture
def words() -> Iterator[str]:
    """The address of a server that is made with the package."""
    port = free_port()
    process = subprocess.Popen([PYTHON, ROOT / "tests/openenv/made_by_openenv.py", str(port)])
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        return False

    try:
        wait_until(is_up, "OpenEnv's server is up", idle_seconds=LIMIT_SECONDS)
        yield url
    finally:
        process.terminate()
        process.wait(IDLE_SECONDS)


async def test_a_server_made_with_the_package_is_an_environment_here(serving: Any, words: str) -> None:
    async with serving(server(f"openenv+{words}")) as client:
        reply = (await client.post("/reset", json={"seed": 1, "episodes": 3})).json()
        assert reply["environment"]["state"]["kind"] == "messages"
        said, broken, _ = reply["episodes"]
        word = said["state"][0]["content"].removeprefix("Say ").rstrip(".")
        assert word in ("apple", "pear", "plum")
        again = (await client.post("/reset", json={"seed": 1})).json()["episodes"][0]
        assert again["state"] == said["state"]

        async def step(episode: dict[str, Any], number: int, action: str) -> dict[str, Any]:
            item = {"episode": episode["episode"], "step": number, "action": action}
            return (await client.post("/step", json={"steps": [item]})).json()["results"][0]

        wrong = await step(said, 0, "fig")
        assert (wrong["status"], wrong["reward"], wrong["state"][-1]["content"]) == ("running", 0.0, "No.")
        right = await step(said, 1, word)
        assert (right["status"], right["reward"]) == ("terminated", 1.0)
        assert [m["role"] for m in right["state"]] == ["user", "assistant", "user", "assistant", "user"]
        lost = await step(broken, 0, "break")
        assert (lost["status"], lost["state"]) == ("lost", None)
        assert "a gear fell off" in lost["detail"]
