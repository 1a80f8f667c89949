"""Agents in front of a real gateway, whose engine answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from transformers import AutoTokenizer

from evaluation.evaluation import AgentWorkflow
from evaluation.servers import parse_url
from evaluation.settings import EvaluationSettings
from evaluation.store import Kind, Sample
from services.clients.agent_episodes import EpisodePlayer
from services.clients.gateway import GatewayClient
from services.clients.play import Score
from services.core.endpoints import ENDPOINTS_VARIABLE
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.http.server import serving
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardResult
from services.reward_server.answers import judge
from tests.services.gateway.fake_engine import FakeEngine
from tests.waiting import IDLE_SECONDS, wait_ready

PROMPT = Prompt(id="p/1", prompt="What is 6 times 7?", ground_truth="42", category="products")
SETTINGS = EvaluationSettings(max_new_tokens=50, temperature=0.7, top_p=0.9, seed=3, jobgroup_token=SecretStr("t"))


def call(name: str, arguments: str) -> str:
    """A call of a tool, as Qwen's models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def score(items: Any) -> list[RewardResult]:
    """Judge plain numbers as the reward-server does."""
    judged = [judge(item.response, item.ground_truth) for item in items]
    return [RewardResult(reward=float(j.is_right is True), extracted=j.answer) for j in judged]


class Engine(FakeEngine):
    """A rollout node that answers with texts, one a request, and then with "?"."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(self._next)
        self.says: list[str] = []
        self._tokenizer = tokenizer

    def _next(self, _request: dict[str, Any]) -> list[int]:
        text = self.says.pop(0) if self.says else "?"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id]

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            await super().__call__(scope, receive, send)

    def reply(self, request: dict[str, Any]) -> Any:
        # It serves no adapter.
        return 400 if "lora_path" in request else super().reply(request)

    @property
    def asked(self) -> list[str]:
        """The prompts, as text."""
        return [self._tokenizer.decode(ids) for ids in self.prompts()]

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The sampling parameters of the requests."""
        return [request["sampling_params"] for request in self.requests]


@dataclass
class Ground:
    """An engine with a gateway in front."""

    engine: Engine
    gateway: GatewayClient
    patience: float = IDLE_SECONDS

    def workflow(
        self, agent: Any, settings: EvaluationSettings = SETTINGS, scorer: Score = score, places: int = 4
    ) -> AgentWorkflow:
        player = EpisodePlayer(self.gateway, "m", scorer, settings, patience=self.patience)
        return AgentWorkflow(settings, player, agent, asyncio.Semaphore(places))

    async def play(self, agent: Any, says: Sequence[str] = (), kind: Kind = Kind.GREEDY, **options: Any) -> Sample:
        """Play an episode in which the model says some texts."""
        self.engine.says = list(says)
        [sample] = await self.workflow(agent, **options).sample(PROMPT, kind, [4])
        return sample


@asynccontextmanager
async def ground_on(model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ground]:
    """A gateway in front of an engine that answers as a test says."""
    engine = Engine(AutoTokenizer.from_pretrained(model))
    async with serving(engine) as url:
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({"rollout-server-0:30000": url.removeprefix("http://")}))
        token = SETTINGS.jobgroup_token
        app = create_app(GatewaySettings(model_name=str(model), gateway_dir=directory, jobgroup_token=token))
        async with app.router.lifespan_context(app):
            await wait_ready(app)
            async with serving(app) as address, GatewayClient(parse_url(address), SETTINGS.token) as gateway:
                engine.requests.clear()
                yield Ground(engine, gateway)
