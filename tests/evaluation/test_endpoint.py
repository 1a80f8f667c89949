"""Servers of any make that speak OpenAI's API: what they are asked, what they answer, and which are refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from openai.types.chat import CompletionCreateParams as ChatParams
from pydantic import TypeAdapter

from evaluation.openai_engine import OpenAIEngine
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.prompts import Message, Prompt
from services.protocol.rewards import FinishReason
from tests.services.run_page.serving import served
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until

PROMPT = Prompt(
    id="p/1",
    prompt="3+4=",
    ground_truth="7",
    prompt_ids=[5, 6, 7],
    messages=[Message(role="system", content="Add."), Message(role="user", content="3+4=")],
)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)

Answer = Callable[[dict[str, Any]], Any]


def said(text: str = "7", **reply: Any) -> dict[str, Any]:
    """A reply of the chat route."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    } | reply


class Fake:
    """A server that answers completions by a function of the request's body, and keeps the bodies."""

    def __init__(self, answer: Answer, models: Any = ("m",)) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.app = FastAPI()

        @self.app.get("/v1/models")
        def listed() -> Any:
            return models if isinstance(models, Response) else {"data": [{"id": name} for name in models]}

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.asked.append(await request.json())
            self.keys.add(request.headers.get("authorization"))
            return answer(self.asked[-1])


@asynccontextmanager
async def endpoint(url: str, model: str = "m", **options: Any) -> AsyncIterator[OpenAIEngine]:
    given: dict[str, Any] = {"is_chat": True, "key": None, "places": 4, "seconds": IDLE_SECONDS, **options}
    async with OpenAIEngine(f"{url}/v1", model, **given) as server:
        yield server


async def test_a_conversation_is_asked_for_by_the_chat_route() -> None:
    fake = Fake(lambda _: said("It is 7."))
    with served(fake.app) as url:
        async with endpoint(url, key="secret", template_args={"enable_thinking": False}) as server:
            await server.admit(IDLE_SECONDS)
            params = SamplingParams(8, 0.5, 0.9, stop=["Q:"])
            [first, second] = await server.complete(PROMPT, params, 2, seed=3)
    assert fake.asked[1] == {
        "model": "m",
        "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}],
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["Q:"],
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    TypeAdapter(ChatParams).validate_python(fake.asked[1])
    assert fake.asked[2]["seed"] == 4
    assert fake.keys == {"Bearer secret"}
    assert first == second
    assert (first.completion, first.finish_reason, first.tokens) == ("It is 7.", FinishReason.STOP, 3)
    assert server.shortcomings == ["token ids", "whether seeds are used"]


async def test_a_server_that_needs_other_parameters_gets_them() -> None:
    def answer(body: dict[str, Any]) -> Any:
        for name, hint in (("max_tokens", "use 'max_completion_tokens' instead"), ("seed", "unknown parameter seed")):
            if name in body:
                return JSONResponse({"error": {"message": hint}}, 400)
        return said() | {"usage": None}

    fake = Fake(answer)
    with served(fake.app) as url:
        async with endpoint(url) as server:
            await server.admit(IDLE_SECONDS)
            [answered] = await server.complete(PROMPT, GREEDY, 1, seed=3)
    assert answered.completion == "7"
    assert "seed" not in fake.asked[-1]
    assert fake.asked[-1]["max_completion_tokens"] == 8
    assert server.shortcomings == ["token ids", "samples by seed (it refuses them)", "numbers of tokens"]


async def test_sampling_fields_are_left_out_where_a_server_refuses_one() -> None:
    def answer(body: dict[str, Any]) -> Any:
        for name in ("max_tokens", "top_k", "seed"):
            if name in body:
                return JSONResponse({"error": {"message": f"Unrecognized: {name}, max_completion_tokens"}}, 400)
        return said()

    fake = Fake(answer)
    with served(fake.app) as url:
        async with endpoint(url) as server:
            await server.admit(IDLE_SECONDS)
            await server.complete(PROMPT, GREEDY, 1, seed=3)
    assert fake.asked[-1].keys() == {"model", "messages", "max_completion_tokens", "temperature", "top_p"}
    [told] = [fact for fact in server.shortcomings if "neutral" in fact]
    assert "top_k" in told


NO_ROUTE = JSONResponse({"detail": "Not Found"}, 404)


@pytest.mark.parametrize(
    ("answer", "models", "message"),
    [
        (lambda _: said(), ["another", "third"], "has no model 'm', but another, third"),
        (lambda _: JSONResponse({"error": "who are you?"}, 401), NO_ROUTE, "401 .*who are you.*--api-key-env"),
        (lambda _: said(), JSONResponse({"error": "no key"}, 401), "401.*no key.*--api-key-env"),
        (lambda _: JSONResponse({"detail": "Not Found"}, 404), NO_ROUTE, "404 Not Found.*base URL"),
        (lambda _: HTMLResponse("<html>Welcome"), NO_ROUTE, r"200 with text/html.*<html>Welcome.*such as http://"),
        (lambda _: {"choices": []}, NO_ROUTE, "is not a completion"),
    ],
    ids=["another model", "refused key", "refused listing", "no route", "a page", "other JSON"],
)
async def test_an_endpoint_that_is_not_what_it_claims_is_an_error_of_configuration(
    answer: Answer, models: Any, message: str
) -> None:
    fake = Fake(answer, models)
    with served(fake.app) as url:
        async with endpoint(url) as server:
            with pytest.raises(ConfigurationError, match=f"(?s){message}"):
                await server.admit(IDLE_SECONDS)


async def test_a_reply_that_is_none_costs_only_its_prompt() -> None:
    fake = Fake(lambda body: said() if len(body["messages"]) == 1 else HTMLResponse("<html>busy"))
    with served(fake.app) as url:
        async with endpoint(url) as server:
            await server.admit(IDLE_SECONDS)
            with pytest.raises(DependencyLostError, match="<html>busy"):
                await server.complete(PROMPT, GREEDY, 1, seed=0)


@pytest.fixture(scope="module")
def transformers_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `transformers serve` with the tiny model, a server of another make."""
    log = tmp_path_factory.mktemp("transformers") / "log"
    # It lists the models of the hub's cache, and fails without one.
    environment = os.environ | {"HF_HUB_CACHE": str(log.parent)}
    with served(FastAPI()) as free:
        port = free.rpartition(":")[2]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(tiny_model), "--host", "127.0.0.1"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--port", port, "--device", "cpu", "--dtype", "float32"],
            env=environment,
            stdout=stream,
            stderr=stream,
        )
    try:

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{free}/health", timeout=IDLE_SECONDS, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_up, "transformers serve is up", told=log.read_text)
        yield free
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


@pytest.mark.slow
async def test_a_server_of_another_make_gives_the_same_greedy_answers(
    transformers_server: str, engine: str, tiny_model: Path
) -> None:
    prompts = [
        PROMPT.model_copy(update={"messages": [Message(role="user", content=f"{a}+{b}=")]})
        for a, b in ((1, 2), (3, 4), (7, 8), (9, 9))
    ]
    async with (
        endpoint(transformers_server, model=str(tiny_model)) as other,
        endpoint(engine, model=str(tiny_model)) as own,
    ):
        await asyncio.gather(other.admit(IDLE_SECONDS), own.admit(IDLE_SECONDS))

        async def answers(server: OpenAIEngine) -> list[Any]:
            return [(await server.complete(prompt, GREEDY, 1, seed=1))[0] for prompt in prompts]

        for theirs, ours in zip(await answers(other), await answers(own), strict=True):
            # That server's text of so small a tokenizer has the prompt and the end token, too.
            assert ours.completion in theirs.completion
            assert (theirs.finish_reason, theirs.tokens) == (ours.finish_reason, ours.tokens)
