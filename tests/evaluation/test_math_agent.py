"""The built-in agent, its model in the embedded engine: it calls its tools, reads what they say, and is right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from evaluation.evaluation import AgentWorkflow
from evaluation.samples import Kind
from evaluation.settings import EvaluationSettings
from services.clients.agent_episodes import EpisodePlayer
from services.embedded_engine.http.app import create_app
from services.engines.settings import RolloutSettings
from services.http.server import serving
from services.protocol.prompts import Prompt
from tests.evaluation.agent_play import ground_at, score
from tests.evaluation.tool_model import questions
from tests.waiting import IDLE_SECONDS, wait_ready


@pytest.mark.slow
async def test_the_agent_solves_questions_with_its_tools_on_the_embedded_engine(
    math_agent: ModuleType, tool_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tool_model)
    app = create_app(RolloutSettings(model_name=model, engine_dtype="float32"))
    rows = questions()[::16]
    prompts = [
        Prompt(id=f"q/{i}", prompt=row["question"], ground_truth=row["answer"], category="")
        for i, row in enumerate(rows)
    ]
    async with app.router.lifespan_context(app), serving(app) as url:
        await wait_ready(app)
        async with ground_at(url, tool_model, tmp_path, monkeypatch) as (pool, gateway):
            player = EpisodePlayer(gateway, model, score, seconds=IDLE_SECONDS, patience=IDLE_SECONDS)
            settings = EvaluationSettings(max_new_tokens=24)
            workflow = AgentWorkflow(settings, pool, player, math_agent.solve, asyncio.Semaphore(9))
            episodes = await asyncio.gather(*(workflow.sample(prompt, Kind.GREEDY, [0]) for prompt in prompts))
    samples = [sample for episode in episodes for sample in episode]
    assert [sample.result.reward for sample in samples] == [1.0] * len(rows)
    assert {(sample.turns, sample.tool_calls) for sample in samples} == {(2, 1)}
    called = [sample.messages[-3]["tool_calls"][0]["function"]["name"] for sample in samples]
    assert called == ["multiply" if "*" in row["question"] else "add" for row in rows]
    assert [sample.messages[-2]["content"] for sample in samples] == [row["answer"] for row in rows]
