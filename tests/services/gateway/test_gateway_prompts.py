"""The next prompt is the held tokens and a suffix, equal to the whole conversation's tokens for any chat template."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.services.gateway.conftest import ADD, StartGateway
from tests.services.gateway.fake_engine import logprob

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
QUESTIONS = ["What is 12 + 30?", "And once more?\n", "Thanks.\n\nBye"]


async def play(running: Any, tools: list[Any] | None, **fields: Any) -> list[dict[str, Any]]:
    """Play three questions with a tool call in each; return the conversation, which only ever grew."""
    path = await running.open()
    given = {"tools": tools, **fields} if tools else fields
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages.append(await running.chat(path, messages, **given))
        calls = messages[-1].get("tool_calls", [])
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]
        if messages[-1]["role"] == "tool":
            messages.append(await running.chat(path, messages, **given))
    return messages


def check_one_sequence(running: Any, trace: dict[str, Any]) -> None:
    """Check that an episode is one sequence, which is the engine's last prompt and completion, all sampled trained."""
    [sequence] = trace["sequences"]
    assert trace["branches"] == 0
    assert trace["sampled_tokens"] == running.engine.completion_tokens == sum(sequence["loss_mask"])
    prompts = running.engine.prompts()
    ids = sequence["prompt_ids"] + sequence["completion_ids"]
    assert all(ids[: len(prompt)] == prompt for prompt in prompts)
    ends = [len(prompt) - len(prompts[0]) for prompt in prompts]
    assert len(sequence["policy_versions"]) == len(sequence["completion_ids"])
    first, later = running.engine.version, running.engine.later_version or running.engine.version
    for place, is_sampled in enumerate(sequence["loss_mask"]):
        turn = max(number for number, end in enumerate(ends) if end <= place)
        within = place - ends[turn]
        if is_sampled:
            assert sequence["logprobs"][place] == pytest.approx(logprob(prompts[turn], within)), place
            assert sequence["policy_versions"][place] == (later if within else first), place


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "smollm2", "qwen3", "demo"])
@pytest.mark.parametrize("with_tools", [False, True])
async def test_an_append_only_conversation_is_one_sequence_of_the_templates_own_tokens(
    gateway: StartGateway, name: str, with_tools: bool
) -> None:
    calls_tools = with_tools and name in ("qwen2.5", "qwen3", "demo")
    call = 'add{"a": 12, "b": 30}' if name == "demo" else CALL
    answers = [call, "It is 42.", f"Again:\n{call}", "Still 42."] if calls_tools else ["It is 42.", "Still 42!"]
    if name == "llama3" and with_tools:
        answers = ['{"name": "add", "parameters": {"a": 12, "b": 30}}', "42"]
    async with gateway(name, answers=[*answers, "Bye."]) as running:
        tools = [ADD] if with_tools else None
        running.engine.later_version = 4
        messages = await play(running, tools)
        trace = await running.finish()
        check_one_sequence(running, trace)
        [sequence] = trace["sequences"]
        assert [message.pop("sampled", False) for message in sequence["messages"]] == [
            message["role"] == "assistant" for message in messages
        ]
        assert sequence["messages"] == messages
        assert trace["tool_calls"] == (2 if calls_tools else 0)
        shown = [_with_objects(message) for message in messages]
        whole = running.whole(shown[:-1], tools=tools)
        text = running.tokenizer.decode(running.engine.prompts()[-1])
        assert running.engine.prompts()[-1] == whole, text


@pytest.mark.parametrize("by", ["request", "setting"])
async def test_qwen3_without_thinking_keeps_its_empty_thoughts_and_stays_one_sequence(
    gateway: StartGateway, by: str
) -> None:
    off = {"enable_thinking": False}
    options = {"chat_template_kwargs": off} if by == "request" else {}
    settings = {"chat_template_args": off} if by == "setting" else {}
    async with gateway("qwen3", answers=[CALL, "It is 42.", CALL, "Still 42.", "Bye."], **settings) as running:
        messages = await play(running, [ADD], **options)
        check_one_sequence(running, await running.finish())
        whole = running.whole([_with_objects(m) for m in messages[:-1]], tools=[ADD], enable_thinking=False)
        prompt = running.tokenizer.decode(running.engine.prompts()[-1])
        assert prompt.count("<think>\n\n</think>\n\n") == 5
        rendered = running.tokenizer.decode(whole)
        assert re.sub(r"<think>\s*</think>\s*", "", prompt) == re.sub(r"<think>\s*</think>\s*", "", rendered)


async def test_a_thought_that_the_template_drops_later_begins_a_new_sequence(gateway: StartGateway) -> None:
    async with gateway("qwen3", answers=["<think>\nhm\n</think>\n\nfour", "five"]) as running:
        path = await running.open()
        messages = [{"role": "user", "content": "2+2?"}]
        messages.append(await running.chat(path, messages))
        messages.append({"role": "user", "content": "2+3?"})
        await running.chat(path, messages)
        trace = await running.finish()
        assert [len(sequence["completion_ids"]) for sequence in trace["sequences"]] != []
        assert (len(trace["sequences"]), trace["branches"]) == (2, 1)
        assert running.engine.prompts()[1] == running.whole(messages)


async def test_a_truncated_turn_is_closed_by_tokens_that_are_not_trained(gateway: StartGateway) -> None:
    async with gateway(answers=["a long answer", "ok"]) as running:
        path = await running.open(max_turn_tokens=3)
        messages = [{"role": "user", "content": "Hello"}]
        reply = await running.client.post(path, json={"messages": messages, "model": "m"})
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "Go on"}]
        await running.chat(path, messages)
        trace = await running.finish()
        check_one_sequence(running, trace)
        [sequence] = trace["sequences"]
        assert sequence["loss_mask"][:4] == [True, True, True, False]
        assert sequence["completion_ids"][3] == running.tokenizer.eos_token_id
        assert running.engine.prompts()[1][: len(running.engine.prompts()[0]) + 3] == (
            running.engine.prompts()[0] + sequence["completion_ids"][:3]
        )


async def test_an_edited_history_makes_a_branch_and_each_token_is_trained_once(gateway: StartGateway) -> None:
    async with gateway(answers=["one", "two", "three", "four"]) as running:
        path = await running.open()
        first = [{"role": "user", "content": "a"}]
        said = await running.chat(path, first)
        longer = [*first, said, {"role": "user", "content": "b"}]
        await running.chat(path, longer)
        await running.chat(path, [*first, said, {"role": "user", "content": "B, rather"}])
        edited = [{"role": "user", "content": "a, edited"}, said, {"role": "user", "content": "b"}]
        await running.chat(path, edited)
        trace = await running.finish()
        assert trace["turns"] == 4
        assert trace["branches"] == 2
        assert len(trace["sequences"]) == 3
        trained = sum(sum(sequence["loss_mask"]) for sequence in trace["sequences"])
        assert trained == trace["sampled_tokens"] == running.engine.completion_tokens
        shared = len(trace["sequences"][1]["completion_ids"]) - sum(trace["sequences"][1]["loss_mask"])
        assert shared > len(running.tokenizer.encode("one"))


async def test_an_agent_may_write_space_and_json_anew(gateway: StartGateway) -> None:
    async with gateway(answers=[f" Well.\n{CALL}", "42"]) as running:
        path = await running.open()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "12 + 30?"}]
        said = await running.chat(path, messages, tools=[ADD])
        call = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"b":30,"a":12}'}}
        messages += [
            {"role": "assistant", "content": f"{said['content']} ", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "mine", "content": [{"type": "text", "text": "42"}]},
        ]
        await running.chat(path, messages, tools=[ADD])
        check_one_sequence(running, await running.finish())


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    from services.chat.messages import for_template

    return for_template(message)
