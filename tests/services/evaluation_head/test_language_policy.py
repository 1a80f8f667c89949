"""A language model as a policy, through the rollout servers' OpenAI routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from services.embedded_engine.app import create_app as create_engine_app
from services.engines.settings import RolloutSettings
from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS, stats_show


class Guesser:
    """A rollout server whose model finds a number by bisection."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.version = 4
        self.status = 200
        self.at_once = self.most_at_once = 0
        self.holds = False
        self.refuses = ""
        """The reply to the first guess with which it refuses a conversation."""

        @self.app.get("/model_info")
        async def info() -> Any:
            return {"weight_version": str(self.version)}

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                while self.holds:  # noqa: ASYNC110  # another thread's
                    await asyncio.sleep(0.01)
            finally:
                self.at_once -= 1
            if self.status != 200:
                return Response('{"detail": "no"}', self.status, media_type="application/json")
            messages = (await request.json())["messages"]
            if self.refuses in [message["content"] for message in messages[2:3]]:
                return Response('{"detail": "too long"}', 400, media_type="application/json")
            said = str(bisect(messages))
            return {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}


def bisect(messages: list[dict[str, str]]) -> int:
    """Return the next guess after the replies so far."""
    low, high = 1, 100
    for guess, answer in zip(messages[1::2], messages[2::2], strict=True):
        if answer["content"] == "Higher.":
            low = int(guess["content"]) + 1
        else:
            high = int(guess["content"]) - 1
    return (low + high) // 2


@pytest.fixture
def guesser() -> Iterator[tuple[Guesser, str]]:
    model = Guesser()
    with served(model.app) as url:
        yield model, url


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


LOWER = [*user("guess"), {"role": "assistant", "content": "50"}, *user("Lower.")]


async def test_conversations_are_answered_in_order_with_their_version(serving: Any, head: Any, guesser: Any) -> None:
    model, url = guesser
    async with serving(head(head_policies=f"llm={url}", RELOAD_SECONDS=0.05)) as client:
        reply = (await client.post("/evaluate", json={"states": [user("guess"), LOWER]})).json()
        assert (reply["actions"], reply["policy_versions"]) == (["50", "25"], [4, 4])
        model.version = 5
        await stats_show(client, lambda stats: stats["policies"][0]["version"] == 5)
        reply = (await client.post("/evaluate", json={"state": LOWER})).json()
        assert (reply["action"], reply["policy_versions"]) == ("25", [5])


async def test_a_conversation_that_is_refused_costs_its_own_episode_alone(
    serving: Any, head: Any, guesser: Any
) -> None:
    model, url = guesser
    model.refuses = "Higher."
    settings = EnvironmentSettings(environment="guessing")
    with served(create_environment_app(settings)) as environment:
        options = {"head_policies": f"llm={url}", "head_drive_total": 12, "head_drive_episodes": 12}
        async with serving(head(game_server_addresses=environment, **options)) as client:
            stats = await stats_show(client, lambda s: s["episodes"]["finished"] + s["episodes"]["lost"] == 12)
            assert 1 < stats["episodes"]["finished"] < 11
            # Seven guesses always find one of a hundred numbers.
            assert stats["returns"]["mean"] == 1.0
            assert stats["servers"][0]["states"] <= 7 * 12
            assert "an episode was given up: " in stats["servers"][0]["detail"]
            assert "too long" in stats["servers"][0]["detail"]


async def test_states_other_than_conversations_are_refused(serving: Any, head: Any, guesser: Any) -> None:
    model, url = guesser
    wrong: list[tuple[list[Any], str]] = [
        ([], "at least 1 item"),
        ([1.0, 2.0], "is not a list of messages"),
        ([{"role": "user"}], "0.content"),
        ([{"role": "boss", "content": "x"}], "0.role"),
    ]
    async with serving(head(head_policies=f"llm={url}")) as client:
        for state, says in wrong:
            response = await client.post("/evaluate", json={"states": [user("guess"), state]})
            assert response.status_code == 422
            assert "state 1" in response.json()["detail"]
            assert says in response.json()["detail"]
        # A conversation that the model's server refuses affects no later one.
        model.status = 400
        response = await client.post("/evaluate", json={"state": user("guess")})
        assert response.status_code == 422
        assert "refuses the conversation" in response.json()["detail"]
        model.status = 200
        assert (await client.post("/evaluate", json={"state": user("guess")})).json()["action"] == "50"


async def test_concurrent_conversations_are_bounded(serving: Any, head: Any, guesser: Any) -> None:
    model, url = guesser
    model.holds = True
    options = {"head_policies": f"llm={url}", "head_llm_concurrency": 3, "MAX_WAITING": 8}
    async with serving(head(**options)) as client:
        waiting = asyncio.create_task(client.post("/evaluate", json={"states": [user("guess")] * 8}))
        await stats_show(client, lambda stats: stats["policies"][0]["waiting"] == 8 and model.at_once == 3)
        refused = await client.post("/evaluate", json={"state": user("guess")})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        model.holds = False
        assert (await waiting).json()["actions"] == ["50"] * 8
    assert model.most_at_once == 3


async def test_an_unreachable_rollout_server_fails_the_request_in_time(serving: Any, head: Any) -> None:
    gone = "http://127.0.0.1:9"
    async with serving(head(head_policies=f"llm={gone}", ANSWER_SECONDS=0.5)) as client:
        response = await client.post("/evaluate", json={"state": user("guess")})
        assert response.status_code == 500
        assert gone in response.json()["detail"]
        assert (
            "version of the rollout server's weights is unknown"
            in (await client.get("/stats")).json()["policies"][0]["trouble"]
        )


async def test_the_embedded_engine_answers_the_same_through_the_head(serving: Any, head: Any, tiny_model: Path) -> None:
    questions = ["3+4=", "2+2=", "9+1="]
    with served_ready(create_engine_app(RolloutSettings(model_name=str(tiny_model), engine_dtype="float32"))) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=IDLE_SECONDS) as engine:
            asked = {"model": "default", "temperature": 0.0, "max_tokens": 4}
            replies = [await engine.post("/v1/chat/completions", json=asked | {"messages": user(q)}) for q in questions]
        async with serving(head(head_policies=f"llm={url}", head_llm_max_tokens=4)) as client:
            found = (await client.post("/evaluate", json={"states": [user(q) for q in questions]})).json()
    assert found["actions"] == [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    assert all(found["actions"])
    assert len(set(found["policy_versions"])) == 1
    assert isinstance(found["policy_versions"][0], int)
