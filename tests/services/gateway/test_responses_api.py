"""OpenAI's Responses API: what becomes of a request, its reply, and what is refused."""

from __future__ import annotations

from typing import Any

from tests.services.gateway.conftest import ADD, Running, StartGateway
from tests.services.gateway.test_gateway_routes import HELLO

TOOL = {"type": "function", "strict": True, **ADD["function"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


async def post(running: Running, body: dict[str, Any], session: str = "s", **headers: str) -> Any:
    url = f"/sessions/{session}/v1/responses"
    return await running.client.post(url, json={"model": "m", **body}, headers=headers)


async def test_a_conversation_of_chat_completions_goes_on_in_responses(gateway: StartGateway) -> None:
    async with gateway(answers=["I add.\n" + CALL, "It is 3.", "Bye."]) as running:
        path = await running.open()
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
        await running.chat(path, chat, tools=[ADD])
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"b":2,"a":1}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
        ]
        asked = {"instructions": "Be brief.", "tools": [TOOL]}
        second = (await post(running, {**asked, "input": items})).json()
        third = {"previous_response_id": second["id"], "input": "Thanks", "include": ["message.output_text.logprobs"]}
        reply = (await post(running, {**asked, **third})).json()
        [part] = reply["output"][0]["content"]
        assert (part["text"], len(part["logprobs"])) == ("Bye.", reply["usage"]["output_tokens"])
        trace = await running.finish()
        assert (trace["turns"], len(trace["sequences"]), trace["branches"]) == (3, 1, 0)
        assert sum(trace["sequences"][0]["loss_mask"]) == running.engine.completion_tokens


async def test_instructions_hold_for_one_response(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        first = (await post(running, {"input": "One", "instructions": "Be brief."})).json()
        second = (await post(running, {"input": "Two", "previous_response_id": first["id"]})).json()
        third = {"input": "Three", "instructions": "Be long.", "previous_response_id": second["id"]}
        assert (await post(running, third)).status_code == 200
        history = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Hi."}]
        history.append({"role": "user", "content": "Two"})
        wanted = [
            history,
            [
                {"role": "system", "content": "Be long."},
                *history,
                {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": "Three"},
            ],
        ]
        assert running.engine.prompts()[1:] == [running.whole(messages) for messages in wanted]


async def test_items_render_as_the_template_has_them(gateway: StartGateway) -> None:
    async with gateway("qwen3", answers=[CALL + CALL, "Yes."]) as running:
        await running.open()
        first = (await post(running, {"input": "One", "tools": [TOOL]})).json()
        assert [item["type"] for item in first["output"]] == ["function_call"] * 2
        items = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]},
            *({"type": "item_reference", "id": item["id"]} for item in first["output"]),
            {"type": "function_call_output", "call_id": "1", "output": "3"},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "abc"},
        ]
        assert (await post(running, {"input": items})).status_code == 200
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        wanted = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call, call]},
            {"role": "tool", "content": "3"},
        ]
        assert running.engine.prompts()[1] == running.whole(wanted)


async def test_a_turn_that_is_cut_is_incomplete(gateway: StartGateway) -> None:
    async with gateway(answers=["one two three four five"]) as running:
        await running.open()
        body = {"input": "Count", "max_output_tokens": 3}
        reply = (await post(running, body)).json()
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert reply["usage"]["output_tokens"] == 3
        assert b"event: response.incomplete" in (await post(running, {**body, "stream": True})).content


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "messages"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
    ({"input": [{"type": "computer_call"}]}, "'computer_call'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "no item msg_1; send the item itself"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "add", "arguments": "{"}, *HELLO]}, "not readable"),
    ({"input": [*HELLO, {"role": "assistant", "content": "The"}]}, "input: the beginning of an answer"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls: "),
    ({"tool_choice": "required"}, "cannot be forced here; allowed are 'auto' and 'none'"),
    ({"tool_choice": {"type": "function", "name": "add"}}, "cannot be forced"),
    ({"tools": [{"type": "web_search"}]}, "are OpenAI's; offer functions"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format: an answer cannot"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"previous_response_id": "resp_1"}, "no response resp_1; send the conversation itself"),
]


async def test_what_cannot_be_expressed_is_refused(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        for fields, told in BAD:
            reply = await post(running, {"input": HELLO, **fields})
            assert reply.status_code == 400, fields
            assert told in reply.json()["error"]["message"], reply.json()
        assert running.engine.requests == []
        assert (await running.client.get("/sessions/s/v1/responses/resp_1")).status_code == 404
