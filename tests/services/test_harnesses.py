"""Presets: other people's command-line agents, played to their end through the gateway with their real programs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.store import Sample
from services import harnesses
from services.harnesses import PRESETS, program_of
from services.relay import Relay
from tests.evaluation.agent_play import SETTINGS, Ground, call, ground_on
from tests.services.gateway.conftest import make_model

TOOLS = {"claude-code": ("Bash", "command"), "codex": ("exec_command", "cmd"), "mini-swe-agent": ("bash", "command")}
LIMITS = SETTINGS.model_copy(update={"agent_max_turns": 4, "agent_seconds": 120.0, "max_new_tokens": 600})


@pytest.fixture
async def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ground]:
    model = make_model(tmp_path / "model", "qwen2.5")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65_536}))
    async with ground_on(model, tmp_path / "gateway", monkeypatch) as made:
        yield made


def shell(name: str, command: str) -> str:
    """The call with which a harness's model runs a shell command."""
    tool, argument = TOOLS.get(name, ("bash", "command"))
    arguments = {argument: command}
    if name == "opencode":
        arguments["description"] = "Runs it"
    return call(tool, json.dumps(arguments))


async def play(ground: Ground, name: str, says: list[str]) -> Sample:
    command = f"preset:{name}"
    async with Relay(program_of(command, LIMITS.agent_max_turns, LIMITS.max_new_tokens)) as agent:
        return await ground.play(agent, says, settings=LIMITS)


real = [
    pytest.param(
        name,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not harness.is_installed, reason=f"there is no harness {name}; run: make harnesses"),
        ],
    )
    for name, harness in PRESETS.items()
]


@pytest.mark.parametrize("name", real)
async def test_a_harness_calls_a_tool_and_gives_an_answer(ground: Ground, name: str) -> None:
    start = time.monotonic()
    if name == "mini-swe-agent":
        last = [shell(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '#### 42'")]
    else:
        last = ["#### 42"]
    sample = await play(ground, name, [shell(name, "expr 6 '*' 7; pwd; env"), *last])
    print(name, sample.result, sample.turns, sample.tool_calls, round(time.monotonic() - start, 1))
    for asked in ground.engine.asked:
        print("=" * 100)
        print(asked)
    Path(f"/tmp/v/presets.tmp/{name}.txt").write_text("\n=====\n".join(ground.engine.asked))
    assert sample.result.reward == 1.0
