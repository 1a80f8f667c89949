"""The commands of docs/evaluation_head.md: they run here, and SkyPilot has the options in use."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import torch

from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head import checkpoint
from services.evaluation_head.app import create_app
from services.evaluation_head.settings import HeadSettings
from tests.services.evaluation_head.policies import Lean
from tests.services.run_page.serving import served_ready
from tests.skypilot_facts import check_command
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, stats_show

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/evaluation_head.md").read_text()
FENCES = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
HERE = [line for language, tag, text in FENCES if language == "bash" and not tag for line in text.splitlines()]
ON_A_CLUSTER = [line for _, tag, text in FENCES if tag == "cluster" for line in re.split("\n|; ", text)]
POLICIES = "runs/policies/cartpole"


def words_of(start: str) -> list[str]:
    """Return the arguments of the page's only command that begins with ``start``."""
    [command] = [line for line in HERE if line.removeprefix("python -m ").startswith(f"{start} ")]
    return shlex.split(command.removeprefix("python -m ").removeprefix(start))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The policy that the page's first command makes."""
    module = "toys.cartpole"
    words = [str(tmp_path) if word == POLICIES else word for word in words_of(module)]
    subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=True, timeout=LIMIT_SECONDS)
    return tmp_path


@pytest.mark.slow
async def test_the_three_commands_make_a_head_that_plays(start_service: Any, policy: Path) -> None:
    environments, head = words_of("services.environment_server"), words_of("services.evaluation_head")
    assert (environments, head[:2]) == (["--port", "8081"], ["--port", "8080"])
    server = start_service("services.environment_server")
    given = {f"cartpole={POLICIES}": f"cartpole={policy}", "127.0.0.1:8081": f"127.0.0.1:{server.port}"}
    service = start_service("services.evaluation_head", *(given.get(word, word) for word in head[2:]))
    [request] = [orjson.loads(text) for language, _, text in FENCES if language == "json"]
    async with httpx.AsyncClient(base_url=service.url, timeout=IDLE_SECONDS, trust_env=False) as client:
        await stats_show(client, lambda stats: stats["episodes"]["finished"] > 0)
        reply = (await client.post("/evaluate", json=request)).json()
        assert reply["actions"] == [1, 1]
        [shown] = re.findall(r"gives `(\{.*?\})`", PAGE)
        assert orjson.loads(shown) | {"action": None} == reply
        stats = (await client.get("/stats")).json()
    assert stats["returns"]["mean"] == 500


def test_the_python_example_sends_states_as_bytes(lean: Path) -> None:
    [text] = [text for language, _, text in FENCES if language == "python" and "tobytes" in text]
    with served_ready(create_app(HeadSettings(head_policies=f"lean={lean}"))) as url:
        names: dict[str, Any] = {"url": url, "states": np.array([[0, 0, 1, 0], [0, 0, -1, 0]])}
        exec(compile(text, "evaluation_head.md", "exec"), names)
    assert names["reply"]["actions"] == [1, 0]


def test_the_python_example_publishes_a_policy(tmp_path: Path) -> None:
    [text] = [text for language, _, text in FENCES if language == "python" and "publish_policy" in text]
    exec(compile(text, "evaluation_head.md", "exec"), {"module": Lean(), "directory": tmp_path})
    loaded = checkpoint.load(checkpoint.find(tmp_path), torch.device("cpu"))
    assert loaded.source.version == 2


def test_skypilot_has_the_options_of_the_commands() -> None:
    commands = [line for line in ON_A_CLUSTER if line.startswith("sky ")]
    assert len(commands) > 8
    for command in commands:
        check_command(command)


def test_the_named_variables_are_settings() -> None:
    named = set(re.findall(r"\b((?:HEAD|ENVIRONMENT|GAME|DISCOVERY|EVAL)_[A-Z_]+[A-Z])\b", PAGE))
    known = {name.upper() for settings in (HeadSettings, EnvironmentSettings) for name in settings.model_fields}
    assert len(named) > 10
    assert named <= known
