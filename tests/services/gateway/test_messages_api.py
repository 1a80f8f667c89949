"""Anthropic's Messages API: what becomes of a request, its reply, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.conftest import ADD, Running, StartGateway
from tests.services.gateway.test_gateway_routes import HELLO

TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": ADD["function"]["parameters"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.0}}\n</tool_call>'


async def post(running: Running, body: dict[str, Any], session: str = "s", **headers: str) -> Any:
    asked = {"model": "m", "max_tokens": 50, **body}
    return await running.client.post("/v1/messages", json=asked, headers={"x-api-key": session, **headers})


async def test_a_conversation_of_chat_completions_goes_on_in_messages_and_back(gateway: StartGateway) -> None:
    async with gateway(answers=["I add.\n" + CALL, "It is 3.", "Bye."]) as running:
        path = await running.open()
        question = {"role": "user", "content": "1+2?"}
        chat: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, question]
        said = await running.chat(path, chat, tools=[ADD])
        block = {"type": "tool_use", "id": "mine", "name": "add", "input": {"b": 2, "a": 1}}  # as JavaScript writes it
        result = {"type": "tool_result", "tool_use_id": "mine", "content": "3"}
        messages = [
            question,
            {"role": "assistant", "content": [{"type": "text", "text": "I add."}, block]},
            {"role": "user", "content": [result]},
        ]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        reply = (await post(running, {"system": system, "messages": messages, "tools": [TOOL]})).json()
        assert reply["content"] == [{"type": "text", "text": "It is 3."}]
        chat += [said, {"role": "tool", "tool_call_id": "x", "content": "3"}]
        chat += [{"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "Thanks"}]
        await running.chat(path, chat, tools=[ADD])
        trace = await running.finish()
        assert (trace["turns"], len(trace["sequences"]), trace["branches"]) == (3, 1, 0)
        assert trace["sequences"][0]["text"] == "Bye."
        ids = trace["sequences"][0]
        assert (
            running.engine.prompts()[2]
            == (ids["prompt_ids"] + ids["completion_ids"])[: len(running.engine.prompts()[2])]
        )


async def test_messages_render_as_the_template_has_them(gateway: StartGateway) -> None:
    async with gateway("qwen3", answers=["Yes."]) as running:
        await running.open()
        body = {
            "system": "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;\nBe brief.",
            "messages": [
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "Two"},
                {"role": "user", "content": "Three"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                        {"type": "redacted_thinking", "data": "abc"},
                        {"type": "tool_use", "id": "1", "name": "add", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]},
                        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                        {"type": "text", "text": "Go "},
                        {"type": "text", "text": "on"},
                    ],
                },
            ],
        }
        assert (await post(running, body)).status_code == 200
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
        wanted = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": ""},
            {"role": "user", "content": "Go on"},
        ]
        assert running.engine.prompts() == [running.whole(wanted)]


@pytest.mark.parametrize("joined", [None, "", "\n", "\n\n"], ids=["parts", "at once", "lines", "paragraphs"])
@pytest.mark.parametrize("api", ["messages", "chat/completions", "responses"])
async def test_another_hash_of_claude_code_is_no_other_conversation(
    gateway: StartGateway, api: str, joined: str | None
) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        messages = list(HELLO)
        for code in ("eb6c6", "74943"):
            billing = f"x-anthropic-billing-header: cc_version=2.1.107.3d9; cc_entrypoint=cli; cch={code};"
            system: Any = joined and f"{billing}{joined}Be brief."
            if not system:
                parts = [billing, "Be brief."] if joined is None else [f"{billing}Be brief."]
                system = [{"type": "text", "text": part} for part in parts]
            if api == "messages":
                body: dict[str, Any] = {"system": system, "messages": messages, "max_tokens": 9}
            elif api == "responses":
                body = {"input": [{"role": "developer", "content": system}, *messages]}
            else:
                body = {"messages": [{"role": "system", "content": system}, *messages]}
            assert (await running.client.post(f"/sessions/s/v1/{api}", json=body)).status_code == 200
            messages += [{"role": "assistant", "content": "Hi."}, *HELLO]
        assert len((await running.finish())["sequences"]) == 1
        assert "x-anthropic" not in running.tokenizer.decode(running.engine.prompts()[0])
        assert "Be brief." in running.tokenizer.decode(running.engine.prompts()[0])


async def test_other_thoughts_are_another_conversation(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        said = (await post(running, {"messages": HELLO})).json()["content"]
        thought = [{"type": "thinking", "thinking": "Somebody else's.", "signature": ""}]
        for content in (said, thought + said):
            messages = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
            assert (await post(running, {"messages": messages})).status_code == 200
        trace = await running.finish()
        assert (len(trace["sequences"]), trace["branches"]) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "fields", "reason", "stop", "texts"),
    [
        (
            "one Observation: two",
            {"stop_sequences": ["two", "Observation:"]},
            "stop_sequence",
            "Observation:",
            ["one "],
        ),
        ("one two", {"stop_sequences": ["three"]}, "end_turn", None, ["one two"]),
        ("one two three four five six", {"max_tokens": 2}, "max_tokens", None, None),
        ("", {}, "end_turn", None, [""]),
        (CALL, {"tools": [TOOL]}, "tool_use", None, []),
        ('<tool_call>{"name": "add"', {"tools": [TOOL]}, "end_turn", None, ['<tool_call>{"name": "add"']),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}', {"tools": [TOOL]}, "end_turn", None, None),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, "end_turn", None, [CALL]),
    ],
    ids=["stop", "no-stop", "length", "nothing", "call", "half-a-call", "not-a-number", "no-calls"],
)
async def test_why_a_turn_ended(
    gateway: StartGateway, answer: str, fields: dict[str, Any], reason: str, stop: str | None, texts: list[str] | None
) -> None:
    async with gateway(answers=[answer]) as running:
        await running.open()
        reply = (await post(running, {"messages": HELLO, **fields})).json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, stop)
        if texts is not None:
            assert [block["text"] for block in reply["content"] if block["type"] == "text"] == texts
        unparsed = (await running.finish())["unparsed_tool_calls"]
        assert unparsed == (CALL not in answer and "tools" in fields)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "The"}]}, "end with a message of the user"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]}, "'tool_use'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"tool_choice": {"type": "any"}}, "cannot be forced here; allowed are 'auto' and 'none'"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "cannot be forced"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "are Anthropic's; offer tools with name"),
    ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "send the whole conversation"),
    ({"max_tokens": 0}, "max_tokens"),
]


async def test_what_cannot_be_expressed_is_refused(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        for fields, told in BAD:
            reply = await post(running, {"messages": HELLO, **fields})
            refused = reply.json()
            assert (reply.status_code, refused["type"], refused["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            ), fields
            assert told in refused["error"]["message"], refused
        assert running.engine.requests == []
