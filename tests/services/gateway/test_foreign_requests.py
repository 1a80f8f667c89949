"""Requests of agents from elsewhere: each field is obeyed, ignored and counted, or refused by its name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.gateway.requests import IGNORED, REFUSED
from tests.services.gateway.conftest import ADD, StartGateway
from tests.services.gateway.test_malformed_bodies import BODIES

GUIDE = Path(__file__).parents[3] / "docs/guides/agents.md"
PARAMETERS = {**ADD["function"]["parameters"], "required": ["a", "b"], "additionalProperties": False}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12+30?"}
FLAT = {"type": "function", "strict": True, **ADD["function"], "parameters": PARAMETERS}
TOOL = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


ANTHROPIC: dict[str, Any] = {"model": "m", "max_tokens": 1024, "messages": [USER], "tools": [TOOL | CACHED]}
ANTHROPIC["system"] = [{"type": "text", "text": "Be brief.", **CACHED}]
CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32_000,
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<system-reminder>x"}, {"type": "text", "text": "Hi", **CACHED}],
        }
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.189.3d9; cc_entrypoint=sdk-py; cch=1f;"},
        {"type": "text", "text": "You are a Claude agent.", **CACHED},
    ],
    "tools": [{**TOOL, "eager_input_streaming": True}, {**TOOL, "name": "Task", "defer_loading": False}],
    "metadata": {"user_id": '{"device_id":"1","session_id":"2"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_CODE_NEXT = CLAUDE_CODE | {
    "messages": [
        *CLAUDE_CODE["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I add."},
                {
                    "type": "tool_use",
                    "id": "c1",
                    "name": "add",
                    "input": {"a": 1, "b": 2},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3", "is_error": False, **CACHED}],
        },
    ]
}
OF_CHAT: dict[str, Any] = {"model": "m", "messages": [SYSTEM, USER]}
SMOLAGENTS: dict[str, Any] = {"model": "m", "messages": [texts(SYSTEM), texts(USER)], "stop": ["Observation:"]}
RESPONSES: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "input": [USER], "tools": [FLAT], "include": []}
ANSWERED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-agents, Responses, second turn": (
        "responses",
        RESPONSES
        | {
            "input": [
                USER,
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
                {"type": "function_call", "id": "f", "call_id": "c1", "status": "completed", **CALL["function"]},  # type: ignore[dict-item]
                {"type": "function_call_output", "call_id": "c1", "output": "42"},
            ],
            "include": ["reasoning.encrypted_content"],
            "store": False,
        },
    ),
    "langgraph, a named agent": (
        "chat/completions",
        OF_CHAT
        | {"messages": [SYSTEM, USER, {**ANSWERED, "name": "adder"}, {**RESULT, "name": "add"}]}
        | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "smolagents, CodeAgent": ("chat/completions", SMOLAGENTS),
    "smolagents, CodeAgent, second turn": (
        "chat/completions",
        SMOLAGENTS
        | {
            "messages": [
                *SMOLAGENTS["messages"],
                texts({"role": "assistant", "content": "add(12, 30)"}),
                texts({"role": "user", "content": "Observation:\n42"}),
            ]
        },
    ),
    "claude-agent-sdk": ("messages", CLAUDE_CODE),
    "claude-agent-sdk, second turn": ("messages", CLAUDE_CODE_NEXT),
    "litellm, anthropic": (
        "messages",
        ANTHROPIC
        | {"tools": [{**TOOL, "type": "custom"}], "messages": [texts(USER)], "system": [texts(SYSTEM)["content"][0]]},
    ),
    "dspy": ("chat/completions", OF_CHAT | {"temperature": None, "max_tokens": None, "n": 1}),
    "mini-swe-agent": (
        "chat/completions",
        OF_CHAT | {"temperature": 0.0, "parallel_tool_calls": True, "tools": [ADD], "tool_choice": "auto"},
    ),
    "node openai, stream": (
        "chat/completions",
        OF_CHAT | {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ),
    "vercel ai": ("chat/completions", OF_CHAT | {"tools": [ADD], "tool_choice": "auto", "max_completion_tokens": 64}),
    "autogen": ("chat/completions", OF_CHAT | {"messages": [SYSTEM, {**USER, "name": "user"}]}),
}


@pytest.mark.parametrize("template", ["qwen2.5", "llama3"])
async def test_no_first_request_of_an_agent_is_refused(gateway: StartGateway, template: str) -> None:
    async with gateway(template, answers=["Hi."]) as running:
        await running.open(max_turns=len(FIRST))
        refused = {}
        for name, (path, body) in FIRST.items():
            reply = await running.client.post(f"/sessions/s/v1/{path}", json=body)
            if reply.status_code != 200:
                refused[name] = reply.text
        assert refused == {}
        assert len(running.engine.requests) == len(FIRST)


def counted(name: str) -> float:
    return REGISTRY.get_sample_value("gateway_fields_ignored_total", {"field": name}) or 0.0


@pytest.mark.parametrize("api", BODIES)
async def test_a_field_that_changes_the_answer_is_refused_by_name_and_any_other_ignored_and_counted(
    gateway: StartGateway, api: str
) -> None:
    handled = {*BODIES[api], "stream_options"} if api == "chat/completions" else {*BODIES[api]}
    body = {**BODIES[api], "stream": False}
    async with gateway(answers=["Hi."]) as running:
        await running.open()
        url = f"/sessions/s/v1/{api}"
        foreign = {"chat/completions": [], "messages": ["stop", "n", "response_format"], "responses": ["stop", "n"]}[
            api
        ]
        for name in [*REFUSED, *foreign]:
            odd = False if REFUSED.get(name) is True else 2
            reply = await running.client.post(url, json={**body, name: odd})
            assert (reply.status_code, reply.json()["error"]["message"].partition(":")[0]) == (400, name)
        assert running.engine.requests == []
        hints = sorted(IGNORED - handled)
        before = [counted(name) for name in [*hints, "other"]]
        usual = {name: [] if value is None else value for name, value in REFUSED.items()}
        sent = {**body, **usual, **dict.fromkeys(hints, 1), "frobnicate": 1, "top_x": 1}
        assert (await running.client.post(url, json=sent)).status_code == 200
        after = [counted(name) for name in [*hints, "other"]]
        assert [new - old for new, old in zip(after, before, strict=True)] == [1.0] * len(hints) + [2.0 + len(usual)]
        sampling = running.engine.requests[0]["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)


def test_the_guide_lists_the_fields() -> None:
    named = {*re.findall(r"`(\w+)`", GUIDE.read_text())}
    assert {*REFUSED, *IGNORED} - named == set()


TEMPLATES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "no system": lambda text: "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + text,
    "other letters": lambda text: text.replace("message.content", "message.content | upper"),
}
UNWRITTEN: list[tuple[str, dict[str, Any], int]] = [
    ("as it is", {"role": "critic", "content": "Bad."}, 400),
    ("as it is", {"role": "function", "name": "add", "content": "42"}, 400),
    ("as it is", {"role": "user", "content": "Bad.", "function_call": {"name": "add", "arguments": "{}"}}, 400),
    ("as it is", {"role": "critic", "content": " "}, 200),
    ("as it is", {"role": "developer", "content": " Be brief.\n"}, 200),
    ("as it is", {"role": "user", "content": "Bad.", "function_call": None, "refusal": None, "audio": None}, 200),
    ("no system", {"role": "system", "content": "Be brief."}, 400),
    ("no system", {"role": "user", "content": "Be brief."}, 200),
    ("other letters", {"role": "user", "content": "Be brief."}, 200),
]


@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_message_that_the_template_leaves_out_is_refused(
    gateway: StartGateway, models: Any, tmp_path: Path, template: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models("qwen3"), directory)
    file = directory / "chat_template.jinja"
    file.write_text(TEMPLATES[template](file.read_text()))
    async with gateway(directory, answers=["<think>\nhm\n</think>\n\nHi."]) as running:
        path = await running.open()
        begun = [USER, await running.chat(path, [USER])]
        for messages in ([*begun, USER], [USER, {**ANSWERED, "content": "I add."}, RESULT]):
            assert (await running.client.post(path, json={"messages": messages})).status_code == 200, (
                "a thought is left out"
            )
        for place, message, status in UNWRITTEN:
            for messages in ([message, USER], [*begun, message, {"role": "user", "content": "Go on"}]):
                if place == template:
                    reply = await running.client.post(path, json={"messages": messages})
                    assert reply.status_code == status, (message, reply.text)
