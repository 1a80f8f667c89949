"""Agents: what their model is asked, what is recorded, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from evaluation.evaluation import AgentWorkflow, ScoringLostError
from evaluation.samples import Kind
from evaluation.server import RolloutServer
from evaluation.settings import EvaluationSettings
from services.agents import AgentFailedError, load_agent
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardItem, RewardResult, RewardStatus
from tests.evaluation.chat_model import Model, call, score
from tests.services.run_page.serving import served

PROMPT = Prompt(id="p/1", prompt="What is 6 times 7?", ground_truth="42", category="products")
SETTINGS = EvaluationSettings(max_new_tokens=50, temperature=0.7, top_p=0.9, seed=3, jobgroup_token=SecretStr("t"))


@pytest.fixture
async def play() -> AsyncIterator[Any]:
    """``play(agent, model, kind)``: one episode, as a sample."""
    clients: list[httpx.AsyncClient] = []

    async def episode(agent: Any, model: Model, kind: Kind = Kind.GREEDY, **options: Any) -> Any:
        server = RolloutServer("http://server", SETTINGS, "model", 17)
        server.http = httpx.AsyncClient(transport=httpx.ASGITransport(model.app), base_url="http://server")
        clients.append(server.http)
        settings, scorer = options.get("settings", SETTINGS), options.get("score", score)
        workflow = AgentWorkflow(agent, settings, scorer, "m", asyncio.Semaphore(1))
        [sample] = await workflow.sample(server, PROMPT, kind, [4])
        return sample

    yield episode
    for http in clients:
        await http.aclose()


async def test_the_math_agent_uses_its_tools_and_is_scored(math_agent, play):
    model = Model(call("multiply", '{"a": 6, "b": 7}'), call("add", '{"a": 42, "b": 0.5}'), {"content": "#### 42"})
    sample = await play(math_agent.solve, model)
    assert sample.result == RewardResult(reward=1.0, extracted="42")
    assert (sample.turns, sample.tool_calls, sample.completion_tokens, sample.prompt_tokens) == (3, 2, 15, 11)
    assert (sample.completion, sample.finish_reason) == ("#### 42", FinishReason.STOP)
    said_by_tools = [m["content"] for m in sample.messages if m["role"] == "tool"]
    assert said_by_tools == ["42", "42.5"]
    assert [tool["function"]["name"] for tool in model.asked[0]["tools"]] == ["add", "multiply"]
    assert model.authorization == {"Bearer t"}


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        ([{"content": "It is 41."}], 0.0),
        ([call("divide", '{"a": 6, "b": 7}'), {"content": "42"}], 0.0),
        ([call("add", '{"a": 1, "b": 1}')] * 20, 0.0),
        ([call("add", '{"a": "x"}'), {"content": "42"}], 1.0),  # told that the arguments are wrong, it finds the answer
    ],
    ids=["wrong", "no such tool", "never ends", "wrong arguments"],
)
async def test_the_models_mistakes_are_wrong_answers_and_no_failures(math_agent, play, says, reward):
    assert (await play(math_agent.solve, Model(*says))).result.reward == reward


async def ask(example, *, base_url, api_key, http_client, **fields):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = [{"role": "user", "content": example.prompt}]
    reply = await client.chat.completions.create(model=example.model, messages=messages, **fields)
    return reply.choices[0].message.content


async def test_sampling_is_the_evaluations_whatever_the_agent_asks_for(play):
    async def agent(example, **given):
        await ask(example, **given, temperature=2.0, max_completion_tokens=1000)
        await ask(example, **given, max_tokens=7)
        return 0.25

    model = Model(*[{"content": "hm", "finish_reason": "length"}] * 4)
    greedy, sampled = await play(agent, model), await play(agent, model, Kind.SAMPLED)
    assert greedy.result.reward == 0.25
    assert (greedy.index, greedy.category, greedy.finish_reason) == (4, "products", FinishReason.LENGTH)
    first, second, third, fourth = model.asked
    assert (first["temperature"], first["max_tokens"], second["max_tokens"]) == (0.0, 50, 7)
    assert "max_completion_tokens" not in first
    assert (third["temperature"], third["top_p"]) == (0.7, 0.9)
    assert "seed" not in first
    assert third["seed"] != fourth["seed"], "their bodies differ"
    assert sampled.kind is Kind.SAMPLED


async def test_arguments_of_the_chat_template_reach_the_model_and_the_agents_own_win(play):
    settings = SETTINGS.model_copy(update={"chat_template_args": {"enable_thinking": False, "date": "today"}})

    async def agent(example, **given):
        await ask(example, **given)
        await ask(example, **given, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        return 1.0

    model = Model(*[{"content": "hm"}] * 2)
    await play(agent, model, settings=settings)
    first, second = model.asked
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "date": "today"}
    assert second["chat_template_kwargs"] == {"enable_thinking": True, "date": "today"}


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_overloaded_server_is_no_fault_of_the_agent(play, status):
    with pytest.raises(DependencyLostError, match=str(status)):
        await play(ask, Model(status))


async def test_a_server_that_is_gone_is_no_fault_of_the_agent(play):
    model = Model()

    @model.app.middleware("http")
    async def die(_request, _next):
        raise httpx.ReadError("connection reset")

    with pytest.raises(DependencyLostError, match="ReadError"):
        await play(ask, model)


async def test_a_refused_request_and_a_bug_are_the_agents(play):
    with pytest.raises(AgentFailedError, match="BadRequestError"):
        await play(ask, Model(400))

    async def broken(example, **_):
        return 1 / 0

    with pytest.raises(AgentFailedError, match="ZeroDivisionError"):
        await play(broken, Model())


@pytest.mark.parametrize("reward", ["1", float("nan"), [1.0], 1e300, 10**400], ids=lambda reward: str(reward)[:5])
async def test_an_invalid_reward_is_refused(play, reward):
    async def agent(example, **_):
        return reward

    with pytest.raises(AgentFailedError, match="allowed is a finite number, or None"):
        await play(agent, Model())


def test_an_agent_without_its_library_gets_the_install_command(tmp_path, monkeypatch):
    (tmp_path / "agent_of_a_test.py").write_text("import openai\n\nasync def solve(example, **_): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigurationError, match=r"pip install .* '\.\[evaluation\]'"):
        load_agent("AGENT", "agent_of_a_test:solve")


async def test_an_agent_that_does_not_end_is_ended_and_wrong_once_the_model_has_answered(play):
    settings = SETTINGS.model_copy(update={"agent_seconds": 0.5})

    async def silent(example, **_):
        await asyncio.sleep(60)

    with pytest.raises(AgentFailedError, match=r"more than 0\.5 s"):
        await play(silent, Model(), settings=settings)

    async def endless(example, **given):
        await ask(example, **given)
        await asyncio.sleep(60)

    sample = await play(endless, Model({"content": "hm"}), settings=SETTINGS.model_copy(update={"agent_seconds": 5}))
    assert (sample.is_correct, sample.is_over_limit) == (False, True)
    assert "more than 5 s" in sample.result.reason


async def test_the_time_that_calls_take_is_not_the_episodes(play, waits_in_slow_motion):
    model = Model({"content": "hm"}, {"content": "42"})

    @model.app.middleware("http")
    async def slow(request, answer):
        await asyncio.sleep(1.2)
        return await answer(request)

    async def twice(example, **given):
        await ask(example, **given)
        await ask(example, **given, user="again")
        return 1.0

    sample = await play(twice, model, settings=SETTINGS.model_copy(update={"agent_seconds": 1}))
    assert (sample.result.reward, sample.is_over_limit, sample.turns) == (1.0, False, 2)


@pytest.mark.parametrize("ending", ["returns", "waits"])
async def test_an_episode_whose_last_call_no_server_answered_is_played_again_and_not_wrong(play, ending):
    async def forgiving(example, **given):
        await ask(example, **given)
        with contextlib.suppress(openai.APIError):
            await ask(example, **given, user="again")
        await asyncio.sleep(60 if ending == "waits" else 0)
        return 0.0

    settings = SETTINGS.model_copy(update={"agent_seconds": 5})
    with pytest.raises(DependencyLostError, match="503"):
        await play(forgiving, Model({"content": "hm"}, *[503] * 3), settings=settings)


async def loop(example, **given):
    for number in range(100):
        await ask(example, **given, user=str(number))


@pytest.mark.parametrize(
    ("limits", "calls", "said"),
    [({"agent_max_turns": 2}, [50, 50], "2 turns (AGENT_MAX_TURNS)"), ({"agent_max_tokens": 8}, [8, 3], "8 tokens (")],
    ids=["turns", "tokens"],
)
async def test_an_episode_has_the_limits_of_training(play, limits, calls, said):
    settings, model = SETTINGS.model_copy(update=limits), Model(*[{"content": "hm"}] * 9)
    sample = await play(loop, model, settings=settings)
    assert [asked["max_tokens"] for asked in model.asked] == calls
    assert (sample.is_correct, sample.is_over_limit, sample.turns) == (False, True, 2)
    assert said in sample.result.reason

    async def catches(example, **given):
        with pytest.raises(openai.RateLimitError, match="end the agent's loop before"):
            await loop(example, **given)
        return 0.5

    sample = await play(catches, Model(*[{"content": "hm"}] * 9), settings=settings)
    assert (sample.result.reward, sample.turns) == (0.5, 2)


async def vote(example, **given):
    await asyncio.gather(*(ask(example, **given) for _ in range(3)))
    return 1.0


async def test_equal_requests_have_seeds_of_their_own_the_same_each_time(play):
    models = [Model(*[{"content": "hm"}] * 3) for _ in range(2)]
    for model in models:
        await play(vote, model, Kind.SAMPLED)
    first, again = ([asked["seed"] for asked in model.asked] for model in models)
    assert len(set(first)) == 3
    assert sorted(first) == sorted(again)


@pytest.mark.parametrize("failure", [500, 429, "connection"])
async def test_a_retry_has_the_seed_of_the_request_that_failed(play, failure):
    async def patient(example, *, base_url, api_key, http_client):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=2)
        messages = [{"role": "user", "content": example.prompt}]
        for _ in range(2):
            await client.chat.completions.create(model=example.model, messages=messages)
        return 1.0

    model = Model({"content": "hm"}, *[failure] * (failure != "connection"), {"content": "hm"})
    seeds = []

    @model.app.middleware("http")
    async def watch(request, call_next):
        seeds.append(json.loads(await request.body())["seed"])
        if failure == "connection" and len(seeds) == 2:
            raise httpx.ReadError("connection reset")
        return await call_next(request)

    await play(patient, model, Kind.SAMPLED)
    first, failed, retried = seeds
    assert first != failed == retried


async def test_a_retry_of_an_answer_that_was_lost_on_its_way_gets_its_seed(play):
    async def curl(example, *, base_url, api_key, http_client):
        body = {"model": example.model, "messages": [{"role": "user", "content": example.prompt}]}
        for retry in ("0", "1", "0"):
            headers = {"x-stainless-retry-count": retry}
            await http_client.post(f"{base_url}/chat/completions", json=body, headers={**headers, "authorization": "x"})
        return 1.0

    model = Model(*[{"content": "hm"}] * 3)
    await play(curl, model, Kind.SAMPLED)
    first, retried, other = (asked["seed"] for asked in model.asked)
    assert first == retried != other


async def test_an_agent_that_asks_another_client_has_no_score(play):
    async def elsewhere(example, *, base_url, api_key, http_client):
        await http_client.get(f"{base_url}/models")
        return 1.0

    model = Model()

    @model.app.get("/v1/models")
    def models():
        return {"data": []}

    with pytest.raises(AgentFailedError, match=r"without a call .* give the http_client"):
        await play(elsewhere, model)


async def messages_of_anthropic(example, **_):
    # Its client takes no http_client of httpx, so that nothing but its error says what it asked.
    with served(FastAPI()) as url:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="key")
        messages = [{"role": "user", "content": example.prompt}]
        await client.messages.create(model=example.model, max_tokens=5, messages=messages)


async def responses_of_openai(example, *, base_url, api_key, http_client):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    await client.responses.create(model=example.model, input=example.prompt)


async def asks_and_goes_on(example, **given):
    with contextlib.suppress(openai.NotFoundError):
        await responses_of_openai(example, **given)
    return 1.0


@pytest.mark.parametrize("agent", [messages_of_anthropic, responses_of_openai, asks_and_goes_on])
async def test_an_agent_of_an_api_that_cannot_be_evaluated_ends_the_evaluation(play, agent):
    model = Model()

    @model.app.post("/v1/{path}")
    def answer(path):
        raise AssertionError("some servers would answer, neither greedily nor recorded")

    with pytest.raises(ConfigurationError, match=r"asked /v1/(messages|responses): an evaluation samples"):
        await play(agent, model)


@pytest.mark.parametrize(
    ("status", "is_correct"),
    [(RewardStatus.OVER_LIMIT, False), (RewardStatus.TIMEOUT, None), (RewardStatus.ERROR, None)],
)
async def test_an_answer_without_a_reward_is_wrong_only_if_it_exceeded_a_limit(math_agent, play, status, is_correct):
    async def cannot(items: list[RewardItem]) -> list[RewardResult]:
        return [RewardResult(reward=None, status=status, reason="no reward") for _ in items]

    sample = await play(math_agent.solve, Model({"content": "42"}), score=cannot)
    assert (sample.result.reward, sample.result.status) == (None, status)
    assert sample.is_correct is is_correct


async def test_a_reward_server_that_is_gone_ends_the_evaluation_and_not_the_episode(math_agent, play):
    async def gone(_items: list[RewardItem]) -> list[RewardResult]:
        raise ScoringLostError("away")

    with pytest.raises(ScoringLostError):
        await play(math_agent.solve, Model({"content": "42"}), score=gone)
