"""Thoughts and calls of tools in the forms of today's models, read through the gateway's three APIs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from services.chat.answers import FORMS, Answer, parse_calls, read_answer, read_plain_answer
from tests.services.gateway.conftest import ADD, StartGateway
from tests.services.gateway.test_gateway_prompts import check_one_sequence

HELLO = [{"role": "user", "content": "What is 12 + 30?"}]
PARAMETERS = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in [("a", 12), ("b", 30)])
XML = f"<tool_call>\n<function=add>\n{PARAMETERS}</function>\n</tool_call>"
ANSWERS = {
    "qwen3": [f"<think>\nI add.\n</think>\n\n{XML}", "<think>\nDone.\n</think>\n\nIt is 42."],
    "harmony": [
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 12, "b": 30}<|call|>',
        "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|return|>",
    ],
    "gemma4": [
        "<|channel>thought\nI add.<channel|><|tool_call>call:add{a:12,b:30}<tool_call|>",
        "<|channel>thought\nDone.\n<channel|>It is 42.",
    ],
}
"""By template: an answer that calls, and the one after the tool's result, each with a thought."""


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("sends_thoughts", [False, True])
async def test_a_tool_loop_is_one_sequence_whether_or_not_the_agent_sends_thoughts_back(
    gateway: StartGateway, name: str, sends_thoughts: bool
) -> None:
    async with gateway(name, answers=ANSWERS[name]) as running:
        path = await running.open()
        called = await running.chat(path, HELLO, tools=[ADD])
        [call] = called["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 12, "b": 30})
        assert (called["reasoning_content"], called["content"]) == ("I add.", None)
        if not sends_thoughts:
            del called["reasoning_content"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        said = await running.chat(path, [*HELLO, called, result], tools=[ADD])
        assert said == {"role": "assistant", "content": "It is 42.", "reasoning_content": "Done."}
        trace = await running.finish()
        check_one_sequence(running, trace)
        assert (trace["tool_calls"], trace["unparsed_tool_calls"]) == (1, 0)


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_call_that_is_cut_off_or_only_thought_of_is_no_call(gateway: StartGateway, name: str) -> None:
    whole = ANSWERS[name][0]
    closing = {"qwen3": "</parameter>\n</function>\n</tool_call>", "harmony": "}<|call|>", "gemma4": "<tool_call|>"}[
        name
    ]
    begin, end = {
        "qwen3": ("<think>", "</think>"),
        "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
        "gemma4": ("<|channel>thought\n", "<channel|>"),
    }[name]
    draft = whole.rpartition(end)[2].removesuffix("<|call|>")
    async with gateway(name, answers=[whole.removesuffix(closing), f"{begin}Perhaps {draft}{end}"]) as running:
        path = await running.open()
        cut = await running.chat(path, HELLO, tools=[ADD])
        assert "tool_calls" not in cut
        assert "12" in cut["content"]
        thought = await running.chat(path, [*HELLO, *HELLO], tools=[ADD])
        assert "tool_calls" not in thought
        assert "12" in thought["reasoning_content"]
        assert (await running.finish())["unparsed_tool_calls"] == 1


@pytest.mark.parametrize("begun", ["", "<|channel>thought\n<channel|>"])
def test_a_turn_of_gemma_4_goes_on_behind_a_tools_result_and_its_earlier_call_is_not_repeated(begun: str) -> None:
    result = 'response:add{value:<|"|>42<|"|>}<tool_response|>'
    prompt = (
        f"<|turn>user\nhi<turn|>\n<|turn>model\n<|tool_call>call:add{{a:12,b:30}}<tool_call|><|tool_response>{result}"
    )
    form = FORMS["<|tool_call>call:"]
    assert read_answer(form, "It is 42.<turn|>", "", prompt + begun, [ADD]) == Answer("It is 42.")
    raw = "<|channel>thought\nhm<channel|><|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>"
    answer = read_answer(form, raw, "", prompt, [ADD])
    assert (answer.thought, answer.text) == ("hm", "")
    assert [json.loads(call["arguments"]) for call in answer.calls] == [{"a": 1, "b": 2}]


SCHEMAS = {
    "a": {"type": "integer"},
    "b": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    "c": {"type": "boolean"},
    "d": {"type": ["string", "null"]},
    "e": {"enum": [1, 2]},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a", "12", 12),
        ("a", "twelve", "twelve"),
        ("b", "[1, [2]]", [1, [2]]),
        ("b", "None", None),
        ("c", "True", True),
        ("d", "12", "12"),
        ("d", "two\n lines <b>\n", "two\n lines <b>\n"),
        ("e", "1", "1"),
        ("other", '{"x": 1}', '{"x": 1}'),
    ],
)
def test_a_parameters_text_has_the_type_that_its_schema_says(name: str, text: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": SCHEMAS}}}
    written = f"<tool_call>\n<function=add>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    rest, [call], unparsed = parse_calls(f"So:\n{written}", [tool])
    assert (rest, unparsed, json.loads(call["arguments"])) == ("So:", 0, {name: value})


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=add><parameter=a>1</parameter>stray</function></tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call><function=add></tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter></function> and more",
    ],
)
def test_what_is_not_a_whole_function_stays_text_and_is_counted(text: str) -> None:
    assert parse_calls(text, [ADD]) == (text, [], 1)


def test_the_time_to_read_functions_is_in_proportion_to_the_text() -> None:
    started = time.process_time()
    for part in ("<function=a>", "<function=a><parameter=b>", "<function=a><parameter=b>c</parameter>"):
        parse_calls(f"<tool_call>{part}" * 30_000)
        parse_calls(f"<tool_call>{part}" + "<parameter=b>c</parameter>" * 30_000)
    assert time.process_time() - started < 4, "in proportion to its square it takes minutes"


@pytest.mark.parametrize(
    ("text", "is_begun", "thought", "said"),
    [
        ("<think>\nhm\n</think>\n\nfour", False, "hm", "four"),
        ("hm\n</think>four", True, "hm", "four"),
        ("hm, and cut", True, "hm, and cut", ""),
        ("<think>hm", False, "hm", ""),
        ("<think>\n\n</think>\n\nfour", False, "", "four"),
        (" four ", False, "", " four "),
    ],
)
def test_a_thought_stands_apart_from_the_text(text: str, is_begun: bool, thought: str, said: str) -> None:
    answer = read_plain_answer(text, None, is_thought=is_begun)
    assert (answer.thought, answer.text) == (thought, said)


async def test_each_api_has_a_place_for_the_thought_whole_and_streamed(gateway: StartGateway) -> None:
    async with gateway("qwen3", answers=["<think>\nhm\n</think>\n\nfour"]) as running:
        await running.open()
        for api, body, parts in [
            ("chat/completions", {"messages": HELLO}, ["hm", "four"]),
            ("messages", {"messages": HELLO, "max_tokens": 99}, [("thinking", "hm"), ("text", "four")]),
            ("responses", {"input": "What?"}, ["reasoning", "message"]),
        ]:
            url = f"/sessions/s/v1/{api}"
            reply = (await running.client.post(url, json=body)).json()
            events = [
                json.loads(line.removeprefix("data: "))
                for line in (await running.client.post(url, json={**body, "stream": True})).text.splitlines()
                if line.startswith("data: {")
            ]
            if api == "chat/completions":
                message = reply["choices"][0]["message"]
                assert [message["reasoning_content"], message["content"]] == parts
                assert 0 < reply["usage"]["completion_tokens_details"]["reasoning_tokens"] < 4
                deltas = [event["choices"][0]["delta"] for event in events]
                assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["hm"]
            elif api == "messages":
                assert [(block["type"], block[block["type"]]) for block in reply["content"]] == parts
                deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
                assert [d["thinking"] for d in deltas if d["type"] == "thinking_delta"] == ["hm"]
            else:
                assert [item["type"] for item in reply["output"]] == parts
                assert reply["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
                [done] = [event for event in events if event["type"] == "response.reasoning_text.done"]
                assert (done["text"], done["item_id"][:3]) == ("hm", "rs_")


async def test_of_two_equal_texts_the_one_with_the_thought_that_was_sent_is_continued(gateway: StartGateway) -> None:
    answers = ["<think>\none\n</think>\n\nfour", "<think>\nother\n</think>\n\nfour", "five"]
    async with gateway("smollm2", answers=answers) as running:
        path = await running.open()
        reply = await running.client.post(path, json={"messages": HELLO, "n": 2, "model": "m"})
        [_, second] = sorted((c["message"] for c in reply.json()["choices"]), key=lambda m: m["reasoning_content"])
        await running.chat(path, [*HELLO, second, *HELLO])
        prompt = running.tokenizer.decode(running.engine.prompts()[-1])
        assert "other" in prompt
        assert "one" not in prompt.partition("12")[2]
