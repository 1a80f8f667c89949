"""The built-in agent, its model in the embedded engine: it calls its tools, reads what they say, and is right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from evaluation.evaluation import AgentWorkflow
from evaluation.samples import Kind
from evaluation.server import RolloutServer
from evaluation.settings import EvaluationSettings
from services.embedded_engine.http.app import create_app
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardResult
from services.reward_server.answers import Verdict, judge
from services.rollout_server.settings import RolloutSettings
from tests.evaluation.tool_model import questions
from tests.waiting import IDLE_SECONDS, wait_ready


async def score(items: Any) -> list[RewardResult]:
    """Judge plain numbers as the reward-server does."""
    judged = [judge(item.response, item.ground_truth) for item in items]
    return [RewardResult(reward=float(j.verdict is Verdict.RIGHT), extracted=j.answer) for j in judged]


@pytest.mark.slow
async def test_the_agent_solves_questions_with_its_tools_on_the_embedded_engine(
    math_agent: ModuleType, tool_model: Path
) -> None:
    model = str(tool_model)
    app = create_app(RolloutSettings(model_name=model, engine_dtype="float32"))
    rows = questions()[::16]
    prompts = [
        Prompt(id=f"q/{i}", prompt=row["question"], ground_truth=row["answer"], category="")
        for i, row in enumerate(rows)
    ]
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=IDLE_SECONDS) as http,
    ):
        await wait_ready(app)
        workflow = AgentWorkflow(
            math_agent.solve, EvaluationSettings(max_new_tokens=24), score, model, asyncio.Semaphore(9)
        )
        server = RolloutServer("http://engine", EvaluationSettings(), "model", 17)
        server.http = http
        episodes = await asyncio.gather(*(workflow.sample(server, prompt, Kind.GREEDY, [0]) for prompt in prompts))
    samples = [sample for episode in episodes for sample in episode]
    assert [sample.result.reward for sample in samples] == [1.0] * len(rows)
    assert {(sample.turns, sample.tool_calls) for sample in samples} == {(2, 1)}
    called = [sample.messages[-3]["tool_calls"][0]["function"]["name"] for sample in samples]
    assert called == ["multiply" if "*" in row["question"] else "add" for row in rows]
    assert [sample.messages[-2]["content"] for sample in samples] == [row["answer"] for row in rows]
