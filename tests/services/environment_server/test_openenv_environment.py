"""An OpenEnv server as an environment here: numbers, conversations, other forms, and servers that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from websockets.asyncio.server import ServerConnection, serve

from services.core.errors import ConfigurationError, DependencyLostError, NeverReadyError
from services.environment_server.environments import ActionRefusedError, EnvironmentBrokenError, Transition
from services.environment_server.openenv_environment import (
    Forms,
    OpenEnvEnvironment,
    ask_for_forms,
    messages_of,
)
from tests.ports import free_port
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS

MOVE = {
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["x", "y"],
}
SAY = {"properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["text"]}


async def steps(client: Any, episode: str, *actions: Any) -> list[dict[str, Any]]:
    results = []
    for number, action in enumerate(actions):
        item = {"episode": episode, "step": number, "action": action}
        results.append((await client.post("/step", json={"steps": [item]})).json()["results"][0])
    return results


@pytest.mark.parametrize(
    ("environment", "actions"),
    [("CartPole-v1", [1] * 15), ("Pendulum-v1", [[0.5], [-0.25]]), ("guessing", ["50", "no idea", "0", "-1", "7"])],
)
async def test_an_environment_behind_openenv_plays_as_it_does_here(
    serving: Any, app: Any, environment: str, actions: list[Any]
) -> None:
    options = {"environment_max_steps": 5} if environment == "guessing" else {}
    with served_ready(app(environment=environment, **options)) as url:
        async with (
            serving(app(environment=f"openenv+{url}")) as through,
            serving(app(environment=environment, **options)) as here,
        ):
            begun = [(await client.post("/reset", json={"seed": 5})).json() for client in (through, here)]
            assert begun[0]["environment"]["state"] == begun[1]["environment"]["state"]
            assert begun[0]["environment"]["action"] == begun[1]["environment"]["action"]
            assert begun[0]["episodes"][0]["state"] == begun[1]["episodes"][0]["state"]
            played = [
                await steps(client, reply["episodes"][0]["episode"], *actions)
                for client, reply in zip((through, here), begun, strict=True)
            ]
            comparable = [[{**r, "episode": None, "detail": None} for r in results] for results in played]
            assert comparable[0] == comparable[1]


@asynccontextmanager
async def scripted(
    *frames: dict[str, Any] | None, action: dict[str, Any] = SAY, forms: Forms | None = None
) -> AsyncIterator[OpenEnvEnvironment]:
    """An environment whose server answers with ``frames``; None breaks the socket."""
    script = iter(frames)
    heard: list[dict[str, Any]] = []

    async def answer(socket: ServerConnection) -> None:
        async for text in socket:
            heard.append(json.loads(text))
            frame = next(script)
            if frame is None:
                socket.transport.abort()
                return
            await socket.send(json.dumps(frame))

    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        forms = forms or Forms.of({"action": action, "observation": {}})
        environment = OpenEnvEnvironment(f"http://127.0.0.1:{port}", forms)
        environment.heard = heard  # type: ignore[attr-defined]
        yield environment
        environment.close()
        await asyncio.sleep(0)


def observed(reward: float | None = None, *, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "not so", "code": code, "errors": [{"loc": ["x"]}]}}


async def step(environment: OpenEnvEnvironment, action: Any) -> Transition:
    return await environment.step(action)


async def test_an_action_of_several_fields_is_the_models_json() -> None:
    frames = [
        observed(board="empty"),
        observed(None, board="x"),
        error("VALIDATION_ERROR"),
        observed(1, done=True, prompt="Won"),
    ]
    async with scripted(*frames, action=MOVE) as environment:
        first = await environment.reset(3)
        assert "JSON object alone" in first[0]["content"]
        assert json.loads(first[1]["content"]) == {"board": "empty"}
        odd = await step(environment, "to the left")
        assert (odd.reward, odd.terminated, "not JSON" in odd.state[-1]["content"]) == (0.0, False, True)
        assert "not a JSON object" in (await step(environment, "[1]")).state[-1]["content"]
        assert (await step(environment, '```json\n{"x": 1, "y": 2}\n```')).reward == 0.0
        refused = await step(environment, '{"x": "a"}')
        assert refused.state[-1]["content"] == 'VALIDATION_ERROR: not so: [{"loc":["x"]}]'
        last = await step(environment, '{"x": 1, "y": 2}')
        assert (last.reward, last.terminated, last.state[-1]["content"]) == (1.0, True, "Won")
        sent = [message["data"] for message in environment.heard]
        assert sent == [{"seed": 3}, {"x": 1, "y": 2}, {"x": "a"}, {"x": 1, "y": 2}]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (None, "broke"),
        (error("EXECUTION_ERROR"), "took no step"),
        (observed(None, done=True, text="over"), "without any reward"),
        ({"type": "observation", "data": {"observation": {}, "reward": "much"}}, "the reward 'much'"),
        ({"type": "observation", "data": {}}, "no observation"),
        ({"hello": 1}, "another protocol"),
    ],
)
async def test_an_episode_that_cannot_be_judged_is_lost_and_has_no_reward(
    frame: dict[str, Any] | None, says: str
) -> None:
    async with scripted(observed(text="Hello"), frame) as environment:
        assert await environment.reset(1) == [{"role": "user", "content": "Hello"}]
        with pytest.raises(EnvironmentBrokenError if frame else DependencyLostError, match=says):
            await environment.step("x")


async def test_a_full_server_begins_no_episode() -> None:
    async with scripted(error("CAPACITY_REACHED")) as environment:
        with pytest.raises(DependencyLostError, match="CAPACITY_REACHED"):
            await environment.reset(1)


async def test_a_server_of_numbers_refuses_what_it_does_not_take() -> None:
    forms = Forms.of(
        {
            "action": {"properties": {"action": {"type": "integer", "minimum": 1, "maximum": 3}}},
            "observation": {"properties": {"s": {"type": "number"}, "reward": {"type": "number"}}},
        }
    )
    assert (forms.state_field, forms.state.shape, forms.action.start, forms.action.count) == ("s", [], 1, 3)
    async with scripted(observed(s=0.5), error("VALIDATION_ERROR"), forms=forms) as environment:
        assert await environment.reset(1) == 0.5
        with pytest.raises(ActionRefusedError, match="not so"):
            await environment.step(9)


@pytest.mark.parametrize(
    ("observation", "first", "later"),
    [
        ({"prompt": "Play.", "message": "Go."}, "Play.", "Go."),
        ({"result": "7", "done": False}, "7", "7"),
        ({"messages": [], "prompt": "Play."}, "Play.", "Play."),
        ({"messages": [{"content": "a", "sender_id": -1}]}, "a", "a"),
        ({"screen": [1], "metadata": {"x": 1}}, '{"screen":[1]}', '{"screen":[1]}'),
    ],
)
def test_a_model_reads_the_usual_fields_or_the_json(observation: dict[str, Any], first: str, later: str) -> None:
    assert [m["content"] for m in messages_of(observation, is_first=True)] == [first]
    assert messages_of(observation, is_first=False) == [{"role": "user", "content": later}]


def test_an_observation_without_news_has_no_messages() -> None:
    assert messages_of({"messages": []}, is_first=False) == []
    assert messages_of({"metadata": {}}, is_first=False) == []


def test_a_single_field_that_is_not_text_is_the_answers_json() -> None:
    forms = Forms.of({"action": {"properties": {"guess": {"type": "integer"}}}, "observation": {}})
    assert forms.encode("42") == {"guess": 42}
    assert forms.encode('{"guess": 3}') == {"guess": 3}
    with pytest.raises(ActionRefusedError):
        forms.encode("forty")
    assert orjson.dumps(forms.action_schema).decode() in forms.rules()[0]["content"]


async def test_a_server_that_starts_later_is_waited_for_and_another_one_refused(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()
    monkeypatch.setattr("services.http.client.log", SimpleNamespace(warning=lambda *_, **__: waits.set()))
    port = free_port()
    asking = asyncio.create_task(ask_for_forms(f"openenv+http://127.0.0.1:{port}", IDLE_SECONDS))
    await waits.wait()
    with served(app(environment="guessing"), port) as url:
        assert (await asking)[0] == url
    with (
        served(FastAPI()) as other,
        pytest.raises(ConfigurationError, match=r"schema is not an OpenEnv server's: .*404"),
    ):
        await ask_for_forms(f"openenv+{other}", IDLE_SECONDS)
    with pytest.raises(NeverReadyError, match="SERVICE_DEADLINE_SECONDS"):
        await ask_for_forms("openenv+http://127.0.0.1:9", 0.2)
