"""Programs behind a relay: what reaches the server from them, and what they get of its answers."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from services.agents import AgentFailedError, Example, Program
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult
from services.relay import Relay
from tests.evaluation.agent_play import score

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


class Model:
    """An OpenAI-compatible endpoint that says what it is told to, and keeps what it is asked."""

    def __init__(self, *says: dict[str, Any] | int) -> None:
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []
        self.authorization: set[str] = set()
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.asked.append(await request.json())
            self.authorization.add(request.headers["authorization"])
            said = self.says.pop(0)
            if isinstance(said, int):
                return Response('{"error": {"message": "no"}}', said, media_type="application/json")
            message = {"role": "assistant", "content": said.get("content"), "tool_calls": said.get("tool_calls")}
            choice = {"index": 0, "message": message, "finish_reason": said.get("finish_reason", "stop")}
            usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
            return {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }


async def play(model: Model, code: str) -> RewardResult:
    """Let a program in Python answer a prompt by a server, and return its reward."""
    prompt = Prompt(id="p/1", prompt="What is 6 times 7?", ground_truth="42")

    async def scorer(response: str) -> RewardResult:
        return (await score([RewardItem.of(prompt, response)]))[0]

    example = Example.of(prompt, (), model="m", scorer=scorer)
    transport = httpx.ASGITransport(model.app)
    command = f"{shlex.quote(sys.executable)} -S -c {shlex.quote(ASK + code)}"
    async with httpx.AsyncClient(transport=transport) as http, Relay(Program(command)) as agent:
        reward = await agent(example, base_url="http://server/v1", api_key="t", http_client=http)
    return example.result_of(reward)


async def test_a_program_asks_by_the_client_of_its_episode() -> None:
    model = Model({"content": "Six."}, {"content": "#### 42"})
    code = """
messages.append(say(messages, max_tokens=7))
messages.append({"role": "user", "content": "Again."})
print(say(messages)["content"])
assert os.environ["OPENAI_API_KEY"] != "t"
try:
    urllib.request.urlopen(os.environ["OPENAI_BASE_URL"].replace(os.environ["OPENAI_API_KEY"], "other") + "/models")
except urllib.error.HTTPError as error:
    assert error.code == 404, "a key of no episode reaches no server"
else:
    sys.exit("a key of no episode has an answer")
"""
    result = await play(model, code)
    assert (result.reward, result.extracted) == (1.0, "42")
    first, second = model.asked
    assert (first["max_tokens"], [m["content"] for m in second["messages"]][1:]) == (7, ["Six.", "Again."])
    assert model.authorization == {"Bearer t"}, "the key of the server, which the program does not have"


@pytest.mark.parametrize("path", ["/finish", "/v1/../finish", "/v1/%2e%2e/finish", "/v1/a/..%2f..%2ffinish"])
async def test_a_program_reaches_no_route_of_its_session_but_the_models(path: str) -> None:
    model = Model({"content": "?"})
    asked = []

    @model.app.api_route("/{path:path}", methods=["GET", "POST"])
    async def any_other(path: str) -> str:
        asked.append(path)
        return "reached"

    code = f"""
say(messages)
import http.client, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port)
connection.request("POST", url.path.removesuffix("/v1") + {path!r}, body="{{}}")
give(float(connection.getresponse().status))
"""
    assert (await play(model, code)).reward == 404
    assert asked == []


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
    result = await play(model, code)
    assert result.reward == len(b"".join(events))


async def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(AgentFailedError, match="ZeroDivisionError"):
        await play(Model(), "1 / 0")
    with pytest.raises(AgentFailedError, match="HTTP Error 503"):
        await play(Model(503), "say(messages)")
    gone = Model()

    @gone.app.middleware("http")
    async def die(_request: Any, _next: Any) -> Any:
        raise httpx.ReadError("connection reset")

    with pytest.raises(AgentFailedError, match="HTTP Error 502"):
        await play(gone, "say(messages)")


async def test_the_query_of_a_request_reaches_the_server() -> None:
    model = Model({"content": "?"})

    @model.app.post("/v1/query")
    async def query(request: Request) -> str:
        return request.url.query

    code = 'say(messages); give(1.0, reason=json.load(post("/query?beta=true&of=a%26b")))'
    result = await play(model, code)
    assert result.reason == "beta=true&of=a%26b"


async def test_a_preset_whose_call_a_server_fails_at_is_ended_and_the_server_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Program, "ends_when_refused", True)
    asks_on = """
import time
while True:
    try:
        say(messages)
    except urllib.error.HTTPError:
        time.sleep(0.1)
"""
    with pytest.raises(AgentFailedError, match="no") as raised:
        await play(Model({"content": "?"}, 503), asks_on)
    assert raised.value.reason == "server"
