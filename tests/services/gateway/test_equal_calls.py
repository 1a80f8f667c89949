"""Equal requests: as many samples as calls, and the earlier bytes for a request that repeats another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import orjson
import pytest
from fastapi import FastAPI

from services.clients.agent_episodes import RetryingTransport
from services.core.tasks import Stopwatch
from services.gateway.calls import Calls
from services.gateway.sessions import Session
from services.gateway.tree import Call
from services.http.server import serving as serving_on_a_port
from services.protocol.base import derive_seed
from services.relay import Relay
from tests.services.conftest import Serving
from tests.services.gateway.conftest import ADD, Running, StartGateway
from tests.waiting import IDLE_SECONDS, eventually, wait_ready

CHAT = "/sessions/s/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Vote."}]}
RETRY = {"X-Stainless-Retry-Count": "1"}
FIRST = {"X-Stainless-Retry-Count": "0"}


@pytest.fixture
def serving() -> Serving:
    """Serve an application on a port of this machine, because these tests are about connections."""

    @asynccontextmanager
    async def serve(app: FastAPI, *, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        assert token is None
        async with app.router.lifespan_context(app):
            await wait_ready(app)
            async with (
                serving_on_a_port(app) as url,
                httpx.AsyncClient(base_url=url, trust_env=False, timeout=IDLE_SECONDS) as client,
            ):
                yield client

    return serve


def numbered(running: Running) -> None:
    """Let the engine answer each request with the number of the request."""
    running.engine.answer = lambda _request: running.tokenizer.encode(f"{len(running.engine.requests)}")


async def are_repeated(running: Running, times: int) -> None:
    """Wait until that many requests have repeated a call of the session."""

    async def are() -> bool:
        trace = (await running.client.get("/sessions/s/trace")).json()
        return int(trace["calls_repeated"]) >= times

    await eventually(are, f"{times} repeated calls")


async def post(running: Running, body: dict[str, Any] = BODY, **headers: str) -> httpx.Response:
    return await running.client.post(CHAT, json=body, headers=headers)


def text(reply: httpx.Response) -> str:
    """Return the text of a reply's first choice."""
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


async def test_five_equal_requests_are_five_samples_with_ids_of_their_own(gateway: StartGateway) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    async with gateway(answers=[text]) as running:
        await running.open(seed=5)
        url = f"{running.client.base_url}/sessions/s/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="any", http_client=running.client)
        tools: Any = [ADD]
        votes = [await client.chat.completions.create(**BODY, tools=tools) for _ in range(5)]
        digest = votes[0].id.removeprefix("chatcmpl-")
        assert [vote.id for vote in votes] == [f"chatcmpl-{digest}{end}" for end in ("", "-1", "-2", "-3", "-4")]
        calls = [call.id for vote in votes for call in vote.choices[0].message.tool_calls or ()]
        assert (len(set(calls)), calls[0]) == (5, f"call_{digest[:20]}_0_0")
        asked = running.engine.requests
        seeds = [request["sampling_params"]["sampling_seed"] for request in asked]
        assert seeds[0] == derive_seed(5, digest, 0), "seeded runs keep their tokens"
        assert (len(set(seeds)), len({request["rid"] for request in asked})) == (5, 5)
        trace = await running.finish()
        assert (trace["turns"], len(trace["sequences"]), trace["calls_repeated"]) == (5, 5, 0)


async def test_a_counted_retry_gets_the_newest_equal_call_that_no_other_retry_has(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        numbered(running)
        running.engine.may_answer.clear()
        asked = []
        for headers, calls, repetitions in [(FIRST, 1, 0), (FIRST, 2, 0), (RETRY, 2, 1), (RETRY, 2, 2), (RETRY, 3, 2)]:
            asked.append(asyncio.create_task(post(running, **headers)))
            await eventually(lambda calls=calls: len(running.engine.requests) == calls, every=0.01)
            await are_repeated(running, repetitions)
        running.engine.may_answer.set()
        assert [text(reply) for reply in await asyncio.gather(*asked)] == ["1", "2", "2", "1", "3"]
        # Clients that count no retries, such as curl, ask anew.
        assert [text(await post(running, **new)) for new in ({}, RETRY, {"Idempotency-Key": "new"})] == ["4", "4", "5"]


async def test_a_client_that_is_cut_between_record_and_reply_gets_the_same_bytes(
    gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Calls._record
    recorded, may_reply = asyncio.Event(), asyncio.Event()
    sessions: list[Session] = []

    async def held(calls: Calls, session: Session, call: Call) -> None:
        await record(calls, session, call)
        sessions.append(session)
        recorded.set()
        await may_reply.wait()

    monkeypatch.setattr(Calls, "_record", held)

    async with gateway(answers=["Hi."]) as running:
        await running.open()
        numbered(running)
        cut = asyncio.create_task(post(running))
        await recorded.wait()
        # A client that is cancelled closes its connection.
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        [session] = sessions
        may_reply.set()
        await eventually(lambda: not session.in_flight)
        again, another = [await post(running, **headers) for headers in (RETRY, {})]
        assert again.content == orjson.dumps(next(iter(session.tree.calls.values())).reply)
        assert len(running.engine.requests) == 2
        assert text(another) == "2"


async def test_a_key_is_one_call_for_equal_bodies_only(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        numbered(running)
        other = {**BODY, "user": "another"}
        marked = {"X-Request-Mark": "one"}
        said = [
            text(await post(running, **marked)),
            text(await post(running, **marked, **RETRY)),
            text(await post(running, **{"Idempotency-Key": "a"})),
            text(await post(running, **{"Idempotency-Key": "a"}, **FIRST)),
            text(await post(running, other, **{"Idempotency-Key": "a"})),
            text(await post(running, **{"Idempotency-Key": "b"}, **RETRY)),
        ]
        assert said == ["1", "1", "2", "2", "3", "4"]


async def test_a_call_that_failed_gives_its_number_and_its_key_to_the_next(gateway: StartGateway) -> None:
    key = {"Idempotency-Key": "one"}
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        running.engine.troubles = [400]
        assert (await post(running, **key)).status_code == 400
        replies = [await post(running, **key), await post(running)]
        assert [reply.json()["id"].count("-") for reply in replies] == [1, 2]
        assert (await running.finish())["turns"] == 2


async def test_after_a_restart_a_counted_retry_gets_the_newest_equal_call(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        numbered(running)
        assert [text(await post(running)) for _ in range(3)] == ["1", "2", "3"]
    async with gateway(answers=["Hi."]) as running:
        numbered(running)
        assert [text(await post(running, **headers)) for headers in (RETRY, {})] == ["3", "1"]
        trace = await running.finish()
        assert (trace["turns"], trace["calls_repeated"]) == (4, 1)


async def test_each_of_two_samples_of_responses_is_continued_by_its_id(gateway: StartGateway) -> None:
    async with gateway(answers=["red", "blue", "Thanks."]) as running:
        await running.open()
        asked = {"model": "m", "input": "A colour?"}
        url = "/sessions/s/v1/responses"
        first, second = [(await running.client.post(url, json=asked)).json() for _ in range(2)]
        assert first["output"][0]["id"] != second["output"][0]["id"]
        for said in (second, first):
            following = {"model": "m", "input": "Why?", "previous_response_id": said["id"]}
            assert (await running.client.post(url, json=following)).status_code == 200
            assert (await running.client.get(f"{url}/{said['id']}")).json() == said
        trace = await running.finish()
        conversations = [[message["content"] for message in s["messages"]] for s in trace["sequences"]]
        assert conversations == [["A colour?", colour, "Why?", "Thanks."] for colour in ("red", "blue")]


async def test_a_program_that_leaves_the_relay_finds_its_answer_when_it_asks_again(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        numbered(running)
        running.engine.may_answer.clear()

        async def program(_example: Any, *, base_url: str, **_: Any) -> list[str]:
            async with httpx.AsyncClient(trust_env=False) as client:
                url = f"{base_url}/chat/completions"
                left = asyncio.create_task(client.post(url, json=BODY, timeout=IDLE_SECONDS))
                await eventually(lambda: running.engine.requests, "the first request")
                left.cancel()
                await asyncio.wait({left})
                asked = asyncio.create_task(client.post(url, json=BODY, headers=RETRY, timeout=IDLE_SECONDS))
                await are_repeated(running, 1)
                running.engine.may_answer.set()
                return [text(await asked), text(await client.post(url, json=BODY))]

        program.ends_when_refused = False  # type: ignore[attr-defined]
        transport = RetryingTransport(IDLE_SECONDS, Stopwatch())
        async with httpx.AsyncClient(transport=transport) as client, Relay(program) as relay:  # type: ignore[arg-type]
            url = f"{running.client.base_url}/sessions/s/v1"
            said: Any = await relay(SimpleNamespace(), base_url=url, api_key="s", http_client=client)  # type: ignore[arg-type]
        assert said == ["1", "2"]


async def test_a_forced_call_is_the_models_choice_where_the_setting_says_so(gateway: StartGateway) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {**BODY, "tools": [ADD], "tool_choice": "required"}),
        ("responses", {"model": "m", "input": "Add.", "tool_choice": {"type": "function", "name": "add"}}),
        ("messages", {**BODY, "max_tokens": 5, "tool_choice": {"type": "any"}}),
        ("messages/count_tokens", {**BODY, "tool_choice": {"type": "any"}}),
        ("chat/completions", {**BODY, "tools": [ADD], "parallel_tool_calls": False}),
        ("responses", {"input": "Add.", "tools": [{"type": "function", "name": "add"}], "parallel_tool_calls": False}),
        (
            "messages",
            {
                **BODY,
                "tools": [{"name": "add", "input_schema": {}}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
        ),
    ]
    for setting, status in (("auto", 200), ("refuse", 400)):
        async with gateway(answers=["Hi."], forced_tool_calls=setting) as running:
            await running.open(setting)
            for path, body in bodies:
                reply = await running.client.post(f"/sessions/{setting}/v1/{path}", json=body)
                assert reply.status_code == status, reply.text
                assert status == 200 or "FORCED_TOOL_CALLS=auto" in reply.text
            odd = {**bodies[0][1], "tool_choice": "odd"}
            assert (await running.client.post(f"/sessions/{setting}/v1/chat/completions", json=odd)).status_code == 400
