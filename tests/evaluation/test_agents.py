"""Agents: evaluated through the gateway as they are trained, whatever API they speak; whose fault a failure is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from evaluation import multiplying_agent
from evaluation.store import Kind
from services.agents import AgentFailedError, Program, load_agent
from services.core.errors import ConfigurationError
from services.protocol.rewards import FinishReason, RewardResult
from services.relay import Relay
from tests.evaluation.agent_play import PROMPT, SETTINGS, Ground, call
from tests.pages import ROOT, blocks


def settings(**values: Any) -> Any:
    return SETTINGS.model_copy(update=values)


async def test_the_demos_agent_uses_its_tool_and_is_scored(ground: Ground) -> None:
    sample = await ground.play(multiplying_agent.solve, [call("multiply", '{"a": 6, "b": 7}'), "#### 42"])
    assert sample.result == RewardResult(reward=1.0, extracted="42")
    assert (sample.turns, sample.tool_calls, sample.index, sample.category) == (2, 1, 4, "products")
    assert sample.completion_tokens == ground.engine.completion_tokens
    assert sample.prompt_tokens == len(ground.engine.requests[0]["input_ids"])
    assert (sample.completion, sample.finish_reason) == ("#### 42", FinishReason.STOP)
    assert sample.messages is not None
    assert [m["content"] for m in sample.messages if m["role"] == "tool"] == ["372", "42"]
    assert '"name": "multiply"' in ground.engine.asked[0]
    assert not any("sampled" in message for message in sample.messages)


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        (["It is 41."], 0.0),
        ([call("divide", '{"x": 6}'), "41"], 0.0),
        ([call("multiply", '{"a": 1, "b": 1}')] * 20, 0.0),
        ([call("multiply", '{"a": "x"}'), "42"], 1.0),  # told that the arguments are wrong, it finds the answer
    ],
    ids=["wrong", "no such tool", "never ends", "wrong arguments"],
)
async def test_the_models_mistakes_are_wrong_answers_and_no_failures(
    ground: Ground, says: list[str], reward: float
) -> None:
    sample = await ground.play(multiplying_agent.solve, says)
    assert sample.result is not None
    assert sample.result.reward == reward


async def ask(example: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = [{"role": "user", "content": example.prompt}]
    reply: Any = await client.chat.completions.create(model=example.model, messages=messages, **fields)  # type: ignore[call-overload]
    return reply.choices[0].message.content


async def chat(example: Any, **given: Any) -> Any:
    return await example.score(await ask(example, **given))


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_call_is_sampled_as_its_kind_says_and_recorded(ground: Ground, kind: Kind) -> None:
    sample = await ground.play(chat, ["42"], kind)
    assert sample.result == RewardResult(reward=1.0, extracted="42")
    assert (sample.turns, sample.completion) == (1, "42")
    assert sample.messages == [
        {"role": "user", "content": PROMPT.prompt},
        {"role": "assistant", "content": "42"},
    ]
    [sampling] = ground.engine.sampling
    expected = (0.0, 1.0) if kind is Kind.GREEDY else (0.7, 0.9)
    assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (*expected, 50)


async def test_a_refused_request_and_a_bug_are_the_agents(ground: Ground) -> None:
    with pytest.raises(AgentFailedError, match="BadRequestError"):
        await ground.play(lambda example, **given: ask(example, **given, logit_bias={"1": 1}, n=0))

    async def broken(example: Any, **_: Any) -> float:
        return 1 / 0

    with pytest.raises(AgentFailedError, match="ZeroDivisionError"):
        await ground.play(broken)


@pytest.mark.parametrize("reward", ["1", float("nan"), [1.0], 1e300, 10**400], ids=lambda reward: str(reward)[:5])
async def test_an_invalid_reward_is_refused(ground: Ground, reward: Any) -> None:
    async def agent(example: Any, **given: Any) -> Any:
        await ask(example, **given)
        return reward

    with pytest.raises(AgentFailedError, match="allowed is a finite number, or None"):
        await ground.play(agent)


def test_an_agent_without_its_library_gets_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent_of_a_test.py").write_text("import openai\n\nasync def solve(example, **_): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigurationError, match=r"pip install .* '\.\[evaluation\]'"):
        load_agent("AGENT", "agent_of_a_test:solve")


async def test_an_episode_over_a_limit_is_wrong(ground: Ground) -> None:
    async def loop(example: Any, **given: Any) -> None:
        for number in range(100):
            await ask(example, **given, user=str(number))

    sample = await ground.play(loop, ["hm"] * 9, settings=settings(agent_max_turns=2))
    assert (sample.is_correct, sample.is_over_limit, sample.turns) == (False, True, 2)
    assert sample.result is not None
    assert "2 turns (AGENT_MAX_TURNS)" in str(sample.result.reason)


async def test_the_guides_agent_with_anthropics_client_is_recorded(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shown] = [block for block in blocks(ROOT / "docs/guides/agents.md") if block.file == "my_anthropic_agent.py"]
    (tmp_path / "my_anthropic_agent.py").write_text(shown.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sample = await ground.play(load_agent("AGENT", "my_anthropic_agent:solve"), ["42"])
    assert (sample.turns, sample.completion, sample.is_correct) == (1, "42", True)


async def test_a_program_that_asks_nothing_is_told_where_to_ask(ground: Ground) -> None:
    async with Relay(Program("echo 42")) as agent:
        with pytest.raises(AgentFailedError, match="a program asks OPENAI_BASE_URL"):
            await ground.play(agent)
