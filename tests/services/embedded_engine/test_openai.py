"""OpenAI's own client talks to the embedded engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog

from services.chat import tool_calls
from services.embedded_engine.http.app import create_app
from tests.services.embedded_engine.conftest import settings_for
from tests.toy_models import byte_tokenizer
from toys.models import qwen2, random_model, train

Serving = Callable[..., Any]

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
CHAT_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}T{{ tool.function.name }}{% endfor %};{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CONVERSATIONS = {
    "Tadd;u:3+4?<end>a:": f"so {CALL}",
    "u:3+4?<end>a:": "7, I think: ü",
}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model of single bytes that knows two conversations by heart, one with a tool call."""
    directory = tmp_path_factory.mktemp("tool-model")
    tokenizer = byte_tokenizer(["<pad>", "<end>"], CHAT_TEMPLATE, pad_token="<pad>", eos_token="<end>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_model(qwen2(vocab_size=len(tokenizer), **sizes, **heads))
    examples = []
    for prompt, answer in CONVERSATIONS.items():
        before, after = tokenizer(prompt)["input_ids"], tokenizer(answer + "<end>")["input_ids"]
        examples.append((before + after, [-100] * len(before) + after))
    assert any(loss < 0.005 for loss in train(model, lambda: examples, learning_rate=5e-3, steps=500))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def connect(serving: Serving, tool_model: Path) -> Callable[[], Any]:
    @asynccontextmanager
    async def client() -> AsyncIterator[openai.AsyncOpenAI]:
        async with serving(create_app(settings_for(tool_model))) as http:
            yield openai.AsyncOpenAI(base_url="http://service/v1", api_key="none", http_client=http, max_retries=0)

    return client


QUESTION: list[Any] = [{"role": "user", "content": "3+4?"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def test_a_chat_is_answered_with_its_logprobs_and_counts(connect: Callable[[], Any], tool_model: Path) -> None:
    async with connect() as client:
        assert [model.id async for model in client.models.list()] == [str(tool_model)]
        reply = await client.chat.completions.create(
            model="any", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2, n=2
        )
    for choice in reply.choices:
        assert choice.message.content == "7, I think: ü"
        assert choice.finish_reason == "stop"
        # The bytes of the umlaut are tokens of their own; the end token is one too.
        assert bytes(byte for entry in choice.logprobs.content for byte in entry.bytes) == "7, I think: ü<end>".encode()
        assert len(choice.logprobs.content) == len("7, I think: ü".encode()) + 1
        for place in choice.logprobs.content:
            assert place.top_logprobs[0].logprob == pytest.approx(place.logprob, abs=1e-5)
            assert len(place.top_logprobs) == 2
    assert reply.usage.prompt_tokens == len("u:3+4?a:") + 1
    assert reply.usage.completion_tokens == 2 * (len("7, I think: ü".encode()) + 1)


async def test_a_stream_adds_up_to_the_whole_reply(connect: Callable[[], Any]) -> None:
    async with connect() as client:
        stream = await client.chat.completions.create(
            model="any",
            messages=QUESTION,
            temperature=0,
            n=2,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, logprobs, reasons, usage = ["", ""], [0, 0], {}, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                logprobs[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == ["7, I think: ü"] * 2
    assert logprobs == [15, 15]
    assert reasons == {0: "stop", 1: "stop"}
    assert usage is not None
    assert usage.completion_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_part_of_the_text(connect: Callable[[], Any], stream: bool) -> None:
    async with connect() as client:
        reply = await client.chat.completions.create(
            model="any", messages=QUESTION, temperature=0, stop=["thi", "I thing"], stream=stream
        )
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
        else:
            text = reply.choices[0].message.content
    assert text == "7, I "


async def test_texts_are_continued_with_their_logprobs(connect: Callable[[], Any]) -> None:
    async with connect() as client:
        reply = await client.completions.create(
            model="any", prompt=["u:3+4?<end>a:", "Tadd;u:3+4?<end>a:"], temperature=0, max_tokens=4, logprobs=1
        )
        assert [choice.text for choice in reply.choices] == ["7, I", "so <"]
        assert [choice.finish_reason for choice in reply.choices] == ["length", "length"]
        assert reply.choices[0].logprobs.tokens == list("7, I")
        assert reply.choices[0].logprobs.text_offset == [0, 1, 2, 3]
        stream = await client.completions.create(
            model="any", prompt="u:3+4?<end>a:", temperature=0, max_tokens=50, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "7, I think: ü"


async def test_the_models_tool_call_comes_as_one(connect: Callable[[], Any]) -> None:
    async with connect() as client:
        reply = await client.chat.completions.create(model="any", messages=QUESTION, temperature=0, tools=[TOOL])
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "so"
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
        cut = await client.chat.completions.create(
            model="any", messages=QUESTION, temperature=0, tools=[TOOL], max_tokens=len(f"so {CALL}")
        )
        assert (cut.choices[0].finish_reason, len(cut.choices[0].message.tool_calls)) == ("length", 1)
        silent = await client.chat.completions.create(
            model="any", messages=QUESTION, temperature=0, tools=[TOOL], tool_choice="none"
        )
        assert silent.choices[0].message.tool_calls is None


async def test_tools_that_the_models_template_drops_are_answered_and_the_log_says_so_once(
    serving: Serving, tiny_model: Path
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [*QUESTION, {"role": "assistant", "content": "7", "tool_calls": [call]}, *QUESTION]
    with structlog.testing.capture_logs() as logs:
        async with serving(create_app(settings_for(tiny_model))) as http:
            body = {"model": "any", "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 2}
            plain = await http.post("/v1/chat/completions", json=body)
            assert not [line for line in logs if line["log_level"] == "warning"]
            for _ in range(2):
                reply = await http.post("/v1/chat/completions", json=body | {"tools": [TOOL]})
                assert reply.status_code == 200
                assert reply.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
            await http.post("/v1/chat/completions", json=body | {"tools": [TOOL], "messages": messages})
    said = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert said == [
        f"the model never sees the {name} of requests: its chat template drops them" for name in ("tools", "tool_calls")
    ]


async def test_a_streamed_tool_call_shows_nothing_of_its_markup(connect: Callable[[], Any]) -> None:
    async with connect() as client:
        stream = await client.chat.completions.create(
            model="any", messages=QUESTION, temperature=0, tools=[TOOL], stream=True
        )
        text, calls, reason = "", [], None
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
    assert text.strip() == "so"
    assert [(call.index, call.function.name) for call in calls] == [(0, "add")]
    assert json.loads(calls[0].function.arguments) == {"a": 3, "b": 4}
    assert reason == "tool_calls"


async def test_a_response_template_says_what_is_a_call(serving: Serving, tool_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tool_model, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    call = {"open_pattern": r"so <tool_call>\{\"name\": \"(?P<name>\w+)\", \"arguments\": ", "close": "}</tool_call>"}
    call |= {
        "content": "json",
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        "repeats": True,
    }
    fields = {"tool_calls": call, "content": {"close": "<end>"}}
    settings["response_template"] = {"start_anchor": "a:", "fields": fields}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    body = {"model": "any", "messages": QUESTION, "temperature": 0, "tools": [TOOL]}
    async with serving(create_app(settings_for(model))) as http:
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        stream = (await http.post("/v1/chat/completions", json=body | {"stream": True})).text
        [cut] = (await http.post("/v1/chat/completions", json=body | {"stop": "4"})).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 3, "b": 4})
    assert "<tool_call>" not in stream
    assert '"so' not in stream
    assert cut["message"] == {"role": "assistant", "content": f"so {CALL.partition('4')[0]}"}


async def test_what_cannot_be_honoured_is_refused(connect: Callable[[], Any]) -> None:
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    template = {"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}
    chats: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [picture]}]}, "text parts"),
        ({"messages": [{"content": "3"}]}, "role"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": template}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"add_generation_prompt": 1}}}, "conversation"),
    ]
    async with connect() as client:
        for fields, reason in chats:
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.chat.completions.create(**{"model": "any", "messages": QUESTION, **fields})
        for prompt, reason in ([], "empty list"), ("", "no tokens"), ([[]], "no tokens"):
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.completions.create(model="any", prompt=prompt)


def test_text_that_is_no_well_formed_call_is_kept() -> None:
    for text in ("plain", "<tool_call>not json</tool_call>", '<tool_call>{"name": 3}</tool_call>', "a < b <tool"):
        assert tool_calls.parse(text)[:2] == (text, [])


def test_several_calls_are_read_in_order_and_an_unclosed_one_too() -> None:
    second = '<tool_call>\n{"name": "b", "arguments": {}}'
    rest, calls, _ = tool_calls.parse(f"first {CALL}\n{second}")
    assert [call.name for call in calls] == ["add", "b"]
    assert rest == "first"
    assert len({call.id for call in calls}) == 2
