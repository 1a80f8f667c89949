"""Programs that are evaluated: what reaches the server from them, what is recorded, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse

from evaluation.evaluation import AgentWorkflow
from evaluation.samples import Kind, Sample
from evaluation.server import RolloutServer
from services.agents import AgentFailedError
from services.core.errors import DependencyLostError
from services.programs import Program
from services.protocol.rewards import FinishReason
from services.relay import Relay
from tests.evaluation.test_workflows import PROMPT, SETTINGS, Model, score

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def post(path, **body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request)
def say(messages, **fields):
    with post("/chat/completions", model=task["model"], messages=messages, **fields) as reply:
        return json.load(reply)["choices"][0]["message"]
messages = [{"role": "user", "content": task["prompt"]}]
def give(reward, **fields):
    os.write(int(os.environ["GRPO_REWARD_FD"]), json.dumps({"reward": reward, **fields}).encode())
"""


async def play(model: Model, code: str, kind: Kind = Kind.GREEDY) -> Sample:
    """Play an episode of a program in Python against a server."""
    command = f"{sys.executable} -S -c {shlex.quote(ASK + code)}"
    server = RolloutServer("http://server", SETTINGS, "model", 17)
    server.http = httpx.AsyncClient(transport=httpx.ASGITransport(model.app), base_url="http://server")
    async with server.http, Relay(Program(command)) as agent:
        workflow = AgentWorkflow(agent, SETTINGS, score, "m", asyncio.Semaphore(1))
        [sample] = await workflow.sample(server, PROMPT, kind, [4])
        return sample


async def test_a_program_is_measured_as_a_function_is() -> None:
    model = Model({"content": "Six."}, {"content": "#### 42", "finish_reason": "length"})
    code = """
messages.append(say(messages, temperature=2.0, max_tokens=7))
messages.append({"role": "user", "content": "Again."})
print(say(messages, max_tokens=900)["content"])
assert os.environ["OPENAI_API_KEY"] != "t"
"""
    sample = await play(model, code, Kind.SAMPLED)
    assert sample.result is not None
    assert (sample.result.reward, sample.result.extracted) == (1.0, "42")
    assert (sample.turns, sample.completion_tokens, sample.prompt_tokens) == (2, 10, 11)
    assert (sample.completion, sample.finish_reason) == ("#### 42", FinishReason.LENGTH)
    first, second = model.asked
    assert (first["temperature"], first["max_tokens"], second["max_tokens"]) == (0.7, 7, 50)
    assert isinstance(first["seed"], int)
    assert model.authorization == {"Bearer t"}, "the servers' own token, which the program does not have"


async def test_a_program_gives_a_reward_of_its_own() -> None:
    sample = await play(Model({"content": "?"}), 'say(messages); give(0.25, reason="hm")')
    assert sample.result is not None
    assert (sample.result.reward, sample.result.reason) == (0.25, "hm")


async def test_an_answer_of_the_model_is_never_a_reward() -> None:
    text = '{"reward": 1000}'
    sample = await play(Model({"content": text}), 'print(say(messages)["content"])')
    assert sample.result is not None
    assert (sample.result.reward, sample.result.extracted) == (0.0, text)


async def test_a_stream_reaches_the_program_as_it_comes() -> None:
    model = Model({"content": "?"})
    events = [b"data: {}\n\n", b"data: [DONE]\n\n"]

    @model.app.post("/v1/stream")
    async def stream() -> Any:
        async def pieces() -> Any:
            for event in events:
                yield event

        return StreamingResponse(pieces(), media_type="text/event-stream")

    code = 'say(messages); reply = post("/stream"); give(float(len(reply.read())))'
    sample = await play(model, code)
    assert sample.result is not None
    assert sample.result.reward == len(b"".join(events))


async def test_a_server_that_fails_is_no_fault_of_the_program_and_a_bug_is() -> None:
    with pytest.raises(DependencyLostError, match="503"):
        await play(Model(503), "say(messages)")
    with pytest.raises(AgentFailedError, match="a program asks OPENAI_BASE_URL"):
        await play(Model(), "give(1.0)")
    with pytest.raises(AgentFailedError, match=r"exit code 1.*ZeroDivisionError"):
        await play(Model(), "1 / 0")
    gone = Model()

    @gone.app.middleware("http")
    async def die(_request: Any, _next: Any) -> Any:
        raise httpx.ReadError("connection reset")

    with pytest.raises(DependencyLostError, match="ReadError"):
        await play(gone, "say(messages)")


async def test_a_key_of_no_episode_reaches_no_server() -> None:
    code = """
say(messages)
try:
    urllib.request.urlopen(os.environ["OPENAI_BASE_URL"].replace(os.environ["OPENAI_API_KEY"], "other") + "/models")
except urllib.error.HTTPError as error:
    give(error.code)
"""
    sample = await play(Model({"content": "?"}), code)
    assert sample.result is not None
    assert sample.result.reward == 404


async def test_the_query_of_a_request_reaches_the_server() -> None:
    model = Model({"content": "?"})

    @model.app.post("/v1/query")
    async def query(request: Request) -> str:
        return request.url.query

    code = 'say(messages); give(1.0, reason=json.load(post("/query?beta=true&of=a%26b")))'
    sample = await play(model, code)
    assert sample.result is not None
    assert sample.result.reason == "beta=true&of=a%26b"
