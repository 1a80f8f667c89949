"""Bodies of the three APIs with parts replaced at random: an answer or a refusal, never an error of the gateway."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.chat.tokenizers import TextCodec
from tests.services.gateway.conftest import ADD, StartGateway

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = ADD["function"]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [ADD],
        "tool_choice": "auto",
        "stop": ["x"],
        "n": 1,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "messages": {
        "model": "m",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        ],
        "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "max_tokens": 5,
        "output_config": {"effort": "low"},
    },
    "responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": [],
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "stream": False,
    },
}
ODD: list[Any] = [None, True, 0, -1, 1.5, 10**30, "", "odd", [], [[]], {}, {"type": "odd"}, [None], ["odd"], [{}]]
ODD += [
    {"chat_template": "{{ 1/0 }}"},
    {"tokenize": True},
    {"continue_final_message": True},
    "\x00",
    -(2**63),
    {"": {}},
]


def replaced(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a body with something odd in the place of one or two of its parts."""
    made = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2])):
        place: Any = made
        while True:
            key = draw.choice([*place] if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
                break
            place = place[key]
        place[key] = copy.deepcopy(draw.choice(ODD))
    return made


@pytest.mark.parametrize("api", BODIES)
async def test_malformed_bodies_are_answered_or_refused(gateway: StartGateway, api: str) -> None:
    draw = random.Random(api)
    async with gateway(answers=["Hi."]) as running:
        await running.open(max_turns=1000, max_tokens=10_000)
        url = f"/sessions/s/v1/{api}"
        assert (await running.client.post(url, json=BODIES[api])).status_code == 200
        seen = {}
        for _ in range(500):
            body = replaced(BODIES[api], draw)
            reply = await running.client.post(url, json=body)
            assert reply.status_code in (200, 400), (body, reply.text)
            seen[reply.status_code] = reply
        assert seen.keys() == {200, 400}
        refused = await running.client.post(url, json=BODIES[api], headers={"Content-Length": str(10**12)})
        assert (refused.status_code, "send" in refused.json()["error"]["message"]) == (413, True), refused.text


async def test_whatever_the_models_template_raises_refuses_the_call(
    gateway: StartGateway, models: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models("qwen2.5"), directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ 1 // (messages | length - 2) }}")
    async with gateway(directory, answers=["Hi."]) as running:
        path = await running.open()
        assert (await running.client.post(path, json={"messages": HELLO})).status_code == 200
        refused = await running.client.post(path, json={"messages": 2 * HELLO})
        assert (refused.status_code, "chat template" in refused.json()["detail"]) == (400, True), refused.text


async def test_a_message_that_cannot_fit_is_refused_before_it_is_encoded(
    gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        first = [*HELLO, await running.chat(path, HELLO)]
        monkeypatch.setattr(TextCodec, "encode", None)
        for before in ([], first):
            for characters, status in ((5_000_000, 400), (20_000_000, 413)):
                messages = [*before, {"role": "user", "content": "x " * (characters // 2)}]
                refused = await running.client.post(path, json={"messages": messages})
                assert refused.status_code == status, refused.text
                assert status == 413 or refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_tool_call_that_no_template_can_render_is_refused(gateway: StartGateway) -> None:
    question = {"role": "user", "content": "1+2?"}
    deep = [{**CALL, "function": {"name": "add", "arguments": '{"a":' * 500 + "1" + "}" * 500}}]
    half = [{**CALL, "function": {"name": "add", "arguments": '{"a": "\\ud800"}'}}]
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        begun = [question, await running.chat(path, [question], tools=[ADD])]
        wrong = {"must be a list": (True, 7), "500 levels": (deep,), "surrogates not allowed": (half,)}
        for said, calls in ((said, calls) for said, all_calls in wrong.items() for calls in all_calls):
            sent = [question, {"role": "assistant", "content": None, "tool_calls": calls}, question]
            for messages in (sent, [*begun, *sent]):
                refused = await running.client.post(path, json={"messages": messages, "tools": [ADD]})
                assert (refused.status_code, said in refused.json()["detail"]) == (400, True), refused.text


async def test_a_body_that_is_no_object_of_json_is_refused(gateway: StartGateway) -> None:
    labels = {"service": "gateway", "method": "POST", "route": "/sessions/{session_id}/v1/chat/completions"}
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        for content, media_type, status in (
            (b"{", "application/json", 400),
            (b"[1]", "application/json", 422),
            (b"", "application/json", 422),
            (b"[" * 65 + b"]" * 65, "application/json", 400),
            (b"{}", "text/plain", 415),
            (b'{"messages": []}', "application/json; charset=utf-8", 400),
        ):
            refused = await running.client.post(path, content=content, headers={"Content-Type": media_type})
            assert refused.status_code == status
        counted = REGISTRY.get_sample_value("http_requests_total", labels | {"status": "415"})
        assert counted == 1, "calls are counted by their route"
