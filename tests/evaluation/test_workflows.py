"""Agents: what their model is asked, what is recorded, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from evaluation import server as inference
from evaluation.samples import Kind
from evaluation.server import RolloutServer
from evaluation.settings import EvaluationSettings
from evaluation.workflows import AgentWorkflow, ScoringLostError, seed_of
from services.agents import AgentFailedError, load_agent
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.groups import FinishReason, RewardResult, RewardStatus
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem
from tests.evaluation.chat_model import Model, call, score

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
    first, second, third, _ = model.asked
    assert (first["temperature"], first["max_tokens"], second["max_tokens"]) == (0.0, 50, 7)
    assert "max_completion_tokens" not in first
    assert (third["temperature"], third["top_p"]) == (0.7, 0.9)
    assert third["seed"] == seed_of(SETTINGS.seed, PROMPT, Kind.SAMPLED, 4)
    assert seed_of(SETTINGS.seed, PROMPT, Kind.SAMPLED, 5) != third["seed"] == model.asked[3]["seed"]
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


@pytest.mark.parametrize("reward", ["1", float("nan"), [1.0]])
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


async def test_an_agent_that_does_not_end_is_ended(play, monkeypatch):
    monkeypatch.setattr(inference, "PROMPT_SECONDS", 0.05)

    async def agent(example, **_):
        await asyncio.sleep(60)

    with pytest.raises(AgentFailedError, match=r"more than 0\.05 s"):
        await play(agent, Model())


@pytest.mark.parametrize(("status", "is_correct"), [(RewardStatus.TIMEOUT, False), (RewardStatus.ERROR, None)])
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
