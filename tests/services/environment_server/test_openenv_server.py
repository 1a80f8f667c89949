"""OpenEnv's wire on this server: sessions over a WebSocket, errors, sockets that are lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import websockets
from pydantic import SecretStr

from tests.services.environment_server.conftest import ODD
from tests.services.run_page.serving import served_ready
from tests.waiting import IDLE_SECONDS, eventually


class Player:
    """A socket to ``/ws``."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    async def say(self, kind: str, data: Any = None) -> dict[str, Any]:
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        return await self.send(json.dumps(message))

    async def send(self, text: str) -> dict[str, Any]:
        await self.socket.send(text)
        return json.loads(await self.socket.recv())

    async def error(self, kind: str, data: Any = None) -> str:
        frame = await self.say(kind, data)
        assert frame["type"] == "error", frame
        return frame["data"]["code"]


@asynccontextmanager
async def playing(url: str, **options: Any) -> AsyncIterator[Player]:
    async with websockets.connect(f"ws{url.removeprefix('http')}/ws", proxy=None, **options) as socket:
        yield Player(socket)


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=IDLE_SECONDS, trust_env=False) as client:
        yield client


async def test_an_episode_over_the_socket_is_the_one_of_the_same_seed(app: Any) -> None:
    with served_ready(app()) as url:
        async with playing(url) as player, asking(url) as client:
            episode = (await client.post("/reset", json={"seed": 7})).json()["episodes"][0]
            first = await player.say("reset", {"seed": 7, "episode_id": "mine", "unknown": 1})
            assert first["data"]["observation"]["state"] == episode["state"]
            assert (first["type"], first["data"]["reward"], first["data"]["done"]) == ("observation", None, False)
            item = {"episode": episode["episode"], "step": 0, "action": 1}
            result = (await client.post("/step", json={"steps": [item]})).json()["results"][0]
            step = (await player.say("step", {"action": 1}))["data"]
            assert (step["observation"]["state"], step["reward"]) == (result["state"], 1.0)
            while not step["done"]:
                step = (await player.say("step", {"action": 1}))["data"]
            assert step["metadata"]["truncated"] is False
            state = (await player.say("state"))["data"]
            assert state == {"episode_id": "mine", "step_count": step["metadata"]["step_count"]}
            assert await player.error("step", {"action": 1}) == "EXECUTION_ERROR"
            assert (await player.say("reset", {"seed": 7}))["data"]["observation"] == first["data"]["observation"]


async def test_a_conversation_sends_the_messages_that_are_new(app: Any) -> None:
    with served_ready(app(environment="guessing", environment_max_steps=2)) as url:
        async with playing(url) as player:
            first = (await player.say("reset", {}))["data"]["observation"]["messages"]
            assert "2 guesses" in first[0]["content"]
            second = (await player.say("step", {"text": "none"}))["data"]
            assert [m["role"] for m in second["observation"]["messages"]] == ["user"]
            # A client that parses "0" as JSON sends a number.
            last = (await player.say("step", {"text": 0}))["data"]
            assert (last["done"], last["metadata"]["truncated"], last["reward"]) == (True, True, 0.0)
            assert last["observation"]["messages"][0]["content"] == "Higher."


async def test_a_wrong_message_is_answered_with_its_code_and_changes_nothing(app: Any) -> None:
    with served_ready(app(environment=f"{ODD}Broken-v0")) as url:
        async with playing(url) as player:
            assert await player.error("step", {"action": 0}) == "EXECUTION_ERROR"
            await player.say("reset", {"seed": 1})
            assert (await player.send("{"))["data"]["code"] == "INVALID_JSON"
            assert (await player.send("[" * 100 + "]" * 100))["data"]["code"] == "INVALID_JSON"
            assert (await player.send("7"))["data"]["code"] == "VALIDATION_ERROR"
            for unknown in ("jump", "mcp"):
                assert await player.error(unknown) == "UNKNOWN_TYPE"
            assert await player.error("step") == "VALIDATION_ERROR"
            for data in ({"action": 9}, {"text": "left"}, {"action": 0, "more": 1}, {}):
                assert await player.error("step", data) == "VALIDATION_ERROR"
            for data in ({"seed": -1}, {"seed": "x"}, {"index": 3}):
                assert await player.error("reset", data) == "VALIDATION_ERROR"
            assert (await player.say("state"))["data"]["step_count"] == 0
            assert (await player.say("step", {"action": 0}))["data"]["metadata"]["step_count"] == 1
            assert await player.error("step", {"action": 1}) == "EXECUTION_ERROR"
            assert await player.error("step", {"action": 0}) == "EXECUTION_ERROR"
            assert (await player.say("reset", {}))["type"] == "observation"


async def test_a_full_server_says_so(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment_server.episodes.MAX_EPISODES", 1)
    with served_ready(app()) as url:
        async with playing(url) as one, playing(url) as two:
            assert (await one.say("reset", {}))["type"] == "observation"
            assert await two.error("reset", {}) == "CAPACITY_REACHED"
            await one.socket.close()
            assert (await eventually(lambda: begun(two)))["type"] == "observation"


async def begun(player: Player) -> dict[str, Any] | None:
    frame = await player.say("reset", {})
    return frame if frame["type"] == "observation" else None


async def test_a_lost_socket_ends_its_episode(app: Any) -> None:
    with served_ready(app()) as url:
        async with playing(url) as player, asking(url) as client:
            await player.say("reset", {"seed": 3})

            async def held() -> tuple[int, int]:
                stats = (await client.get("/stats")).json()
                return stats["openenv_sessions"], stats["active"]

            assert await held() == (1, 1)
            player.socket.transport.abort()

            async def is_ended() -> bool:
                return await held() == (0, 0)

            await eventually(is_ended)


async def test_the_routes_want_the_token(app: Any) -> None:
    with served_ready(app(jobgroup_token=SecretStr("secret"))) as url:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"ws{url.removeprefix('http')}/ws", proxy=None)
        assert refused.value.response.status_code == 401
        async with asking(url) as client:
            assert (await client.get("/schema")).status_code == 401
            assert (await client.get("/health")).json()["status"] == "healthy"
        async with playing(url, additional_headers={"Authorization": "Bearer secret"}) as player:
            assert (await player.say("reset", {}))["type"] == "observation"


async def test_the_environment_is_described(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        schema = (await client.get("/schema")).json()
        assert schema["action"]["properties"]["action"] == {"type": "integer", "minimum": 0, "maximum": 1}
        assert schema["action"]["required"] == ["action"]
        assert schema["observation"]["properties"]["state"]["minItems"] == 4
        assert (await client.get("/metadata")).json()["name"] == "CartPole-v1"


async def test_tasks_are_played_by_index(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET", "arithmetic")
    monkeypatch.setenv("REWARD_WORKERS", "1")
    with served_ready(app(environment="gsm8k")) as url:
        async with playing(url) as player:
            for bad in ({"split": "test", "index": 10**6}, {"split": "other", "index": 0}):
                assert await player.error("reset", bad) == "VALIDATION_ERROR"
            asked = {"split": "test", "index": 2}
            first = (await player.say("reset", asked))["data"]["observation"]
            assert (await player.say("reset", asked))["data"]["observation"] == first
            assert (await player.say("reset", asked | {"index": 3}))["data"]["observation"] != first
