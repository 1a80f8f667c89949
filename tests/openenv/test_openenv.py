"""OpenEnv 0.10's own client, verifiers' taskset, and a server made with the package; `make test-openenv` runs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest

from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from tests.ports import free_port
from tests.services.conftest import serving as serving  # a fixture
from tests.services.run_page.serving import served_ready
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


def balanced_steps(seed: int) -> tuple[list[float], int]:
    environment = gymnasium.make("CartPole-v1")
    first, _ = environment.reset(seed=seed)
    steps, done = 0, False
    while not done:
        _, _, terminated, truncated, _ = environment.step(1)
        steps, done = steps + 1, terminated or truncated
    return first, steps


def test_the_packages_client_and_verifiers_play_here_unchanged() -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(served_ready(server(name))) for name in ("CartPole-v1", "guessing")]
        done = subprocess.run(
            [PYTHON, ROOT / "tests/openenv/play.py", *urls],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    first, steps = balanced_steps(7)
    assert np.allclose(told["cartpole"]["first"]["state"], first)
    assert (told["cartpole"]["rewards"], told["cartpole"]["steps"]) == ([1.0] * steps, steps)
    assert "EXECUTION_ERROR" in told["cartpole"]["refusal"]
    assert told["verifiers"]["rewards"] == [1.0] * 3


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
