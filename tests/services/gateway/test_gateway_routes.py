"""The gateway's routes: sessions and their limits, repeated requests, lost engines, replies."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from services.chat.answers import parse_calls
from services.protocol.sessions import Trace
from tests.services.gateway.conftest import ADD, StartGateway
from tests.services.gateway.test_equal_calls import are_repeated
from tests.waiting import eventually

HELLO = [{"role": "user", "content": "Hello"}]
KEY = {"Idempotency-Key": "one"}


def error_of(reply: Any) -> tuple[int, str]:
    """Return status and OpenAI's error code of a refusal."""
    error = reply.json()["error"]
    assert error["message"]
    return reply.status_code, error.get("code", "")


async def test_a_session_goes_from_open_to_finished(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        created = {"id": "g-1", "group_id": "g", "index": 1, "seed": 5, "temperature": 0.7, "lora_path": "policy"}
        replies = [await running.client.post("/sessions", json=created) for _ in range(2)]
        assert [reply.json()["status"] for reply in replies] == ["open", "open"]
        assert (await running.client.post("/sessions", json={**created, "seed": 6})).status_code == 409
        await running.chat("/sessions/g-1/v1/chat/completions", HELLO, temperature=0.0, top_p=0.1, seed=1)
        sampling = running.engine.requests[0]["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (0.7, 1.0, 512)
        await running.chat(await running.open("without-adapter"), HELLO)
        assert [request.get("lora_path") for request in running.engine.requests] == ["policy", None]
        rewarded = await running.client.post("/sessions/g-1/reward", json={"reward": 0.5})
        assert rewarded.json() == (await running.client.get("/sessions/g-1")).json()
        assert (rewarded.json()["turns"], rewarded.json()["reward"]) == (1, 0.5)
        before = (await running.client.get("/sessions/g-1/trace")).json()
        trace = await running.finish("g-1")
        assert trace == before == await running.finish("g-1")
        assert Trace.model_validate(trace).sequences[0].text == "Hi."
        assert (trace["group_id"], trace["index"], trace["reward"]) == ("g", 1, 0.5)
        again = await running.client.post("/sessions/g-1/reward", json={"reward": 0.5})
        other = await running.client.post("/sessions/g-1/reward", json={"reward": None, "reason": "late"})
        assert (again.status_code, other.status_code) == (200, 409)
        asked = await running.client.post("/sessions/g-1/v1/chat/completions", json={"messages": HELLO})
        assert error_of(asked) == (409, "session_finished")
        for _ in range(2):
            assert (await running.client.delete("/sessions/g-1")).status_code == 204
        for path in ("/sessions/g-1", "/sessions/g-1/trace"):
            assert (await running.client.get(path)).status_code == 404


async def test_what_is_unknown_malformed_or_forced_is_refused(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        post = running.client.post
        missing = await post("/sessions/nobody/v1/chat/completions", json={"messages": HELLO})
        assert error_of(missing) == (404, "unknown_session")
        bad: list[dict[str, Any]] = [
            {"messages": []},
            {"messages": [{"content": "no role"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": HELLO, "tools": [ADD], "tool_choice": "required"},
            {"messages": HELLO, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            {"messages": HELLO, "n": 0},
            {"messages": HELLO, "top_logprobs": 3},
            {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "add"}}]},
            {"messages": HELLO, "tools": [ADD], "parallel_tool_calls": False},
            {"messages": [*HELLO, {"role": "assistant", "content": "The"}]},
            {"messages": HELLO, "chat_template_kwargs": {"continue_final_message": True}},
            {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}},
        ]
        for body in bad:
            assert error_of(await post(path, json=body))[0] == 400, body
        long = await post(path, json={"messages": [{"role": "user", "content": "x y " * 5000}]})
        assert error_of(long) == (400, "context_length_exceeded")
        assert running.engine.requests == []
        assert (await running.finish())["turns"] == 0


async def test_limits_of_turns_tokens_and_seconds(gateway: StartGateway) -> None:
    async with gateway(answers=["a b c d e f"]) as running:

        async def codes(session: str, **limits: Any) -> list[Any]:
            path = await running.open(session, **limits)
            seen = []
            for number in range(3):
                body = {"messages": [{"role": "user", "content": f"{session} {number}"}]}
                reply = await running.client.post(path, json=body)
                seen.append(200 if reply.status_code == 200 else error_of(reply))
                assert reply.status_code == 200 or reply.headers["x-should-retry"] == "false"
                state = (await running.client.get(f"/sessions/{session}")).json()
                assert state["refused"] == (None if reply.status_code == 200 else seen[-1][1])
            return seen

        assert await codes("turns", max_turns=2) == [200, 200, (429, "max_turns")]
        assert await codes("tokens", max_tokens=9, max_turn_tokens=5) == [200, 200, (429, "max_tokens")]
        assert (await running.finish("tokens"))["sampled_tokens"] == 9
        assert await codes("seconds", deadline_seconds=1e-6) == [(429, "deadline_seconds")] * 3


async def test_a_shorter_turn_and_stop_strings_are_the_agents_choice(gateway: StartGateway) -> None:
    async with gateway(answers=["one Observation: two"]) as running:
        path = await running.open(max_turn_tokens=300)
        await running.chat(path, HELLO, max_tokens=2)
        said = await running.chat(path, HELLO, max_completion_tokens=900, stop="Observation:")
        limits = [request["sampling_params"]["max_new_tokens"] for request in running.engine.requests]
        assert limits == [2, 300]
        assert running.engine.requests[1]["sampling_params"]["stop"] == ["Observation:"]
        assert said["content"] == "one "
        said = await running.chat(path, HELLO, stop=["", "two"])
        assert running.engine.requests[2]["sampling_params"]["stop"] == ["two"], "an empty one would stop at once"
        assert said["content"] == "one Observation: "


async def test_keys(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."], token="secret") as running:
        path = await running.open("mine")
        for url, key, status in [
            (path, "secret", 200),
            (path, "mine", 200),
            (path, "other", 401),
            ("/v1/chat/completions", "mine", 200),
            ("/v1/chat/completions", "secret", 401),
            ("/sessions/mine/finish", "mine", 401),
        ]:
            headers = {"Authorization": f"Bearer {key}"}
            reply = await running.client.post(url, json={"messages": HELLO}, headers=headers)
            assert reply.status_code == status, (url, key, reply.text)
        listed = await running.client.get("/v1/models", headers={"x-api-key": "mine", "Authorization": ""})
        assert listed.json()["data"][0]["max_model_len"] == 4096
        assert len(running.engine.requests) == 3


async def test_a_request_with_the_same_key_gets_the_same_bytes_also_after_a_restart(gateway: StartGateway) -> None:
    body = {"messages": HELLO, "n": 2, "tools": [ADD]}
    seen, prompts, traces = set(), [], []
    for _ in range(2):
        async with gateway(answers=['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "B"]) as running:
            path = await running.open(seed=1)
            running.engine.may_answer.clear()
            posts = [asyncio.create_task(running.client.post(path, json=body, headers=KEY)) for _ in range(3)]
            # The two repeat the first one before it is recorded, unless it is recorded already.
            await are_repeated(running, 2)
            running.engine.may_answer.set()
            seen |= {reply.content for reply in await asyncio.gather(*posts)}
            streamed = await running.client.post(path, json={**body, "stream": True}, headers=KEY)
            assert streamed.text.endswith("data: [DONE]\n\n")
            prompts += running.engine.prompts()
            traces.append((await running.client.get("/sessions/s/trace")).json())
    assert len(seen) == 1
    assert len(prompts) == 2  # one for each choice, all in the gateway's first life
    assert [trace.pop("calls_repeated") for trace in traces] == [3, 6], "a restart forgets one after the last record"
    assert traces[0] == traces[1]
    assert [len(trace["sequences"]) for trace in traces] == [2, 2]


async def test_lost_and_aborted_answers_are_asked_for_again_and_counted(gateway: StartGateway) -> None:
    async with gateway(answers=["Hello to you"]) as running:
        running.engine.troubles = [503, 4, 500, 2]
        path = await running.open(seed=3)
        await running.chat(path, HELLO)
        trace = await running.finish()
        assert trace["lost_tokens"] == {"aborted": 6}
        assert trace["sampled_tokens"] == running.engine.completion_tokens - 6
        assert len({request["sampling_params"]["sampling_seed"] for request in running.engine.requests}) == 1
        assert len({request["rid"] for request in running.engine.requests}) == 5


async def test_an_engine_that_refuses_or_never_answers_ends_the_call(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        running.engine.troubles = [422]
        assert error_of(await running.client.post(path, json={"messages": HELLO}))[0] == 400
        path = await running.open("late", deadline_seconds=5)
        assert (await running.client.get("/sessions/late")).json()["called"] is False
        running.engine.troubles = [503] * 100
        refused = await running.client.post(path, json={"messages": HELLO})
        assert error_of(refused) == (429, "deadline_seconds")
        assert "503" in refused.json()["error"]["message"]
        state = (await running.client.get("/sessions/late")).json()
        assert (state["called"], state["refused"]) == (True, "deadline_seconds")
        assert state["waited_seconds"] >= 3, "the whole time that the call waited"


async def test_a_session_says_how_long_its_calls_have_waited(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:

        async def waited() -> float:
            seconds: float = (await running.client.get("/sessions/s")).json()["waited_seconds"]
            return seconds

        path = await running.open()
        assert await waited() == 0
        running.engine.may_answer.clear()
        # Two calls at once wait once.
        calls = [asyncio.create_task(running.chat(path, [{"role": "user", "content": text}])) for text in ("a", "b")]
        await eventually(lambda: len(running.engine.requests) == 2)
        started, before = time.monotonic(), await waited()
        await asyncio.sleep(0.2)
        during = await waited()
        assert 0.2 <= during - before <= time.monotonic() - started
        running.engine.may_answer.set()
        await asyncio.gather(*calls)
        after = await waited()
        await asyncio.sleep(0.05)
        assert await waited() == after >= during, "the time between calls is the agent's"


async def test_tokens_that_arrive_after_the_end_are_lost(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        running.engine.may_answer.clear()
        call = asyncio.create_task(running.client.post(path, json={"messages": HELLO}))
        await eventually(lambda: running.engine.requests)
        trace = await running.finish()
        running.engine.may_answer.set()
        assert (trace["turns"], trace["sequences"]) == (0, [])
        assert error_of(await call) == (409, "session_finished")
        metrics = (await running.client.get("/metrics")).text
        assert 'gateway_lost_tokens_total{reason="finished"}' in metrics


async def test_calls_that_cannot_be_parsed_stay_text(gateway: StartGateway) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>{"name": </tool_call>'
    async with gateway(answers=[text]) as running:
        path = await running.open()
        body = {"messages": HELLO, "tools": [ADD], "logprobs": True}
        reply = (await running.client.post(path, json=body)).json()
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == '<tool_call>{"name": </tool_call>'
        assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"]
        huge = '<tool_call>{"name": "add", "arguments": {"a": 123456789012345678901234567890}}</tool_call>'
        running.answers[:] = [huge, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>']
        messages: list[dict[str, Any]] = [{"role": "user", "content": "again"}]
        messages.append(await running.chat(path, messages, tools=[ADD]))
        messages.append({"role": "tool", "content": "?"})
        await running.chat(path, messages, tools=[ADD])
        trace = await running.finish()
        assert (trace["tool_calls"], trace["unparsed_tool_calls"]) == (2, 2)
        assert len(trace["sequences"]) == 2


def written(value: str, name: str = "add") -> str:
    """Return a call whose argument is a text."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {json.dumps(value)}}}}}\n</tool_call>'


ONE, TWO, HALF = written("1"), written("2"), '<tool_call>{"name": </tool_call>'
MARKED = ["</tool_call>", "<tool_call>", "</think>", "<think>", '"}}</tool_call>', "\\", '{"', "}" * 3, "<tool_call>{}"]
DRAFTS: list[tuple[str, bool, list[str], int]] = [
    (f"<think>\nPerhaps {ONE}\n</think>\n\n{TWO}", False, ["2"], 0),
    (f"Perhaps {ONE}{HALF}\n</think>{TWO}", True, ["2"], 0),
    (f"Perhaps {ONE}\n</think>{TWO}", False, ["2"], 0),
    (f"{ONE}{HALF}", True, [], 0),
    (f"<think>{ONE}", False, [], 0),
    (f"<think></think>{ONE}<think>{TWO}</think>{written('3')}{HALF}", False, ["3"], 1),
    (f"<think></think>{ONE}<think>{TWO}", False, ["1"], 0),
    (f"{HALF}{ONE} {{}} {TWO}", False, ["1", "2"], 1),
    (f"{ONE.removesuffix('</tool_call>')}", False, ["1"], 0),
    (f"{ONE.removesuffix('</tool_call>')} and {TWO}", False, ["2"], 1),
    ('<tool_call>{"name": "add", "arguments": {"a": "1"}}}</tool_call>', False, [], 1),
    *((f"a{written(text)}{ONE}b", False, [text, "1"], 0) for text in MARKED),
]


@pytest.mark.parametrize(("text", "is_thought", "values", "unparsed"), DRAFTS)
def test_calls_are_read_behind_thoughts_and_whole_whatever_their_arguments_say(
    text: str, is_thought: bool, values: list[str], unparsed: int
) -> None:
    rest, calls, unread = parse_calls(text, is_thought=is_thought)
    assert ([json.loads(call["arguments"])["a"] for call in calls], unread) == (values, unparsed)
    assert values or rest == text, "what is not a call stays text"
    for value in values:
        assert written(value) not in rest


def test_the_time_to_read_calls_is_in_proportion_to_the_text() -> None:
    parts = ["", "{", '{"', '{\\"', '{"\\"', '{",":"', '{"a":"\\"', "\n\n\n", '{"a":']
    parts = [f"<tool_call>{part}" for part in parts] + [" ", "\n", '{"a":', "<think>", "</think>", ONE]
    started = time.process_time()
    for part in parts:
        for text in ("<tool_call>" + part * 30_000, '<tool_call>{"a":"' + part * 30_000):
            parse_calls(text)
    assert time.process_time() - started < 60, "in proportion to its square it takes minutes"


async def test_a_thought_that_the_generation_prompt_begins_has_no_calls(
    gateway: StartGateway, models: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models("qwen3"), directory)
    file = directory / "chat_template.jinja"
    file.write_text(file.read_text() + "{%- if add_generation_prompt %}{{- '<think>\n' }}{%- endif %}")
    async with gateway(directory, answers=[f"Perhaps {ONE}", f"Perhaps {ONE}\n</think>\n\n{TWO}"]) as running:
        path = await running.open()
        assert "tool_calls" not in await running.chat(path, HELLO, tools=[ADD])
        [call] = (await running.chat(path, HELLO, tools=[ADD]))["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": "2"}
        trace = await running.finish()
        assert (trace["tool_calls"], trace["unparsed_tool_calls"]) == (1, 0)


async def test_a_turn_that_was_cut_behind_a_whole_call_says_so_in_all_apis(gateway: StartGateway) -> None:
    tool = {"name": "add", "parameters": {}}
    async with gateway(answers=[ONE + TWO]) as running:
        limit = len(running.tokenizer.encode(ONE + TWO)) - 6
        await running.open(max_turn_tokens=limit)
        url = "/sessions/s/v1/"
        chat = await running.client.post(f"{url}chat/completions", json={"messages": HELLO, "tools": [ADD]})
        [choice] = chat.json()["choices"]
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 1)
        body = {"messages": HELLO, "max_tokens": 999, "tools": [{"name": "add", "input_schema": {}}]}
        messages = (await running.client.post(f"{url}messages", json=body)).json()
        assert (messages["stop_reason"], [b["type"] for b in messages["content"]][-1]) == ("max_tokens", "tool_use")
        asked = {"input": "Hello", "tools": [{"type": "function", **tool}]}
        responses = (await running.client.post(f"{url}responses", json=asked)).json()
        assert (responses["status"], responses["output"][-1]["type"]) == ("incomplete", "function_call")


async def test_logprobs_have_the_texts_of_their_tokens(gateway: StartGateway) -> None:
    text = "5+6=11"
    async with gateway(answers=[text]) as running:
        path = await running.open()
        reply = (await running.client.post(path, json={"messages": HELLO, "logprobs": True})).json()
        entries = reply["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == f"{text}<|im_end|>"


@pytest.mark.parametrize(("levels", "calls"), [(48, 1), (49, 0)])
async def test_a_call_stays_text_that_is_nested_too_deeply_to_be_sent_back(
    gateway: StartGateway, levels: int, calls: int
) -> None:
    arguments = '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    async with gateway(answers=[text]) as running:
        path = await running.open(max_turn_tokens=3000)
        messages = [*HELLO, await running.chat(path, HELLO, tools=[ADD])]
        assert len(messages[-1].get("tool_calls", [])) == calls
        tool = {"name": "add", "input_schema": {"type": "object"}}
        first = {"messages": HELLO, "tools": [tool]}
        answer = (await running.client.post("/sessions/s/v1/messages", json=first)).json()
        again = {**first, "messages": [*HELLO, {"role": "assistant", "content": answer["content"]}, *HELLO]}
        assert (await running.client.post("/sessions/s/v1/messages", json=again)).status_code == 200
        trace = await running.finish()
        assert (trace["tool_calls"], trace["unparsed_tool_calls"]) == (3 * calls, 3 - 3 * calls)


@pytest.mark.parametrize(
    ("text", "calls", "unparsed"),
    [
        ('add{"a": 1, "b": 2}', [("add", {"a": 1, "b": 2})], 0),
        ('so\nadd{"a": 1}\nadd{"b": "2"}', [("add", {"a": 1}), ("add", {"b": 2})], 0),
        ('add{"a": 1', [], 1),
        ('add{"a": 1} makes 3', [], 1),
        ("add{" + '"a": {' * 2000, [], 1),
        ("The sum is 3.", [], 0),
        ('add{"a": 1}, then add{"a": 2}', [], 1),
    ],
)
async def test_a_response_template_says_what_is_a_call(
    gateway: StartGateway, text: str, calls: list[tuple[str, dict[str, int]]], unparsed: int
) -> None:
    async with gateway("demo", answers=[text], engine_context_length=100_000) as running:
        path = await running.open(max_turn_tokens=50_000, max_tokens=50_000)
        message = await running.chat(path, HELLO, tools=[ADD])
        found = [call["function"] for call in message.get("tool_calls", [])]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
        assert message["content"] == (("so" if text.startswith("so") else None) if calls else text)
        trace = await running.finish()
        assert (trace["tool_calls"], trace["unparsed_tool_calls"]) == (len(calls), unparsed)


async def test_an_episode_ends_with_one_request_that_can_be_repeated(gateway: StartGateway) -> None:
    async with gateway(answers=["Hi."]) as running:
        for name in ("first", "second", "open"):
            await running.chat(await running.open(name, max_turns=1), HELLO)
            refused = await running.client.post(f"/sessions/{name}/v1/chat/completions", json={"messages": HELLO * 3})
            assert error_of(refused) == (429, "max_turns")
        replies = [
            await running.client.post("/sessions/first/finish", json={"reward": 0.5, "received": []}) for _ in range(2)
        ]
        assert replies[0].json() == replies[1].json(), "the reply that was lost"
        assert [replies[0].json()[name] for name in ("reward", "turns", "refused")] == [0.5, 1, "max_turns"]
        other = await running.client.post("/sessions/first/finish", json={"reward": 0.25})
        assert other.status_code == 409
        for received in ([], ["first", "second", "open", "nobody"]):
            body = {"reward": None, "reason": "a bug", "received": received}
            last = await running.client.post("/sessions/second/finish", json=body)
            assert (last.status_code, last.json()["reason"]) == (200, "a bug")
        codes = [(await running.client.get(f"/sessions/{name}")).status_code for name in ("first", "second", "open")]
        assert codes == [404, 404, 200], "an open session has no trace that could have arrived"
        stats = (await running.client.get("/stats")).json()
        turn = running.engine.completion_tokens // 3
        assert (stats["trace_tokens"], stats["open_tokens"], stats["lost_tokens"]) == (2 * turn, turn, {})
