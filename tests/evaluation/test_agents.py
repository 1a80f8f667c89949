"""Agents: evaluated through the gateway as they are trained, whatever API they speak; whose fault a failure is."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from evaluation import multiplying_agent
from evaluation.store import Kind
from services.agents import AgentFailedError, Program, load_agent
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.rewards import FinishReason, RewardItem, RewardResult
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


async def test_sampling_is_the_evaluations_whatever_the_agent_asks_for(ground: Ground) -> None:
    async def agent(example: Any, **given: Any) -> float:
        await ask(example, **given, temperature=2.0, max_completion_tokens=1000)
        await ask(example, **given, max_tokens=7)
        return 0.25

    sample = await ground.play(agent, ["hm", "a much longer answer than seven tokens can ever hold"], Kind.SAMPLED)
    assert sample.result is not None
    assert (sample.result.reward, sample.finish_reason) == (0.25, FinishReason.LENGTH)
    first, second = ground.engine.sampling
    assert (first["temperature"], first["max_new_tokens"], second["max_new_tokens"]) == (0.7, 50, 7)
    assert first["sampling_seed"] != second["sampling_seed"], "their bodies differ"


async def vote(example: Any, **given: Any) -> float:
    await asyncio.gather(*(ask(example, **given) for _ in range(3)))
    return 1.0


async def test_equal_requests_have_seeds_of_their_own_the_same_each_time(ground: Ground) -> None:
    seeds = []
    for _ in range(2):
        ground.engine.requests.clear()
        await ground.play(vote, ["hm"] * 3, Kind.SAMPLED)
        seeds.append(sorted(sampling["sampling_seed"] for sampling in ground.engine.sampling))
    assert len(set(seeds[0])) == 3
    assert seeds[0] == seeds[1]


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


async def test_an_agent_that_makes_no_call_has_no_score(ground: Ground) -> None:
    async def elsewhere(example: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
        await http_client.get(f"{base_url}/models", headers={"Authorization": f"Bearer {api_key}"})
        return 1.0

    with pytest.raises(AgentFailedError, match="no call of the model at base_url"):
        await ground.play(elsewhere)


async def test_an_agent_that_does_not_end_is_ended_and_wrong_once_the_model_has_answered(ground: Ground) -> None:
    async def silent(example: Any, **_: Any) -> None:
        await asyncio.sleep(60)

    with pytest.raises(AgentFailedError, match=r"made no call within AGENT_SECONDS=0\.5"):
        await ground.play(silent, settings=settings(agent_seconds=0.5))

    async def endless(example: Any, **given: Any) -> None:
        await ask(example, **given)
        await asyncio.sleep(60)

    sample = await ground.play(endless, ["hm"], settings=settings(agent_seconds=5))
    assert (sample.is_correct, sample.is_over_limit) == (False, True)
    assert sample.result is not None
    assert "more than 5 s" in str(sample.result.reason)


async def loop(example: Any, **given: Any) -> None:
    for number in range(100):
        await ask(example, **given, user=str(number))


@pytest.mark.parametrize(
    ("limits", "calls", "said"),
    [({"agent_max_turns": 2}, [50, 50], "2 turns (AGENT_MAX_TURNS)"), ({"agent_max_tokens": 8}, [8, 5], "8 tokens (")],
    ids=["turns", "tokens"],
)
async def test_an_episode_has_the_limits_of_training(
    ground: Ground, limits: dict[str, int], calls: list[int], said: str
) -> None:
    limited = settings(**limits)
    long = "hm"  # three tokens with the end
    sample = await ground.play(loop, [long, "a longer answer than there is room for"] + [long] * 7, settings=limited)
    assert [sampling["max_new_tokens"] for sampling in ground.engine.sampling][:2] == calls
    assert (sample.is_correct, sample.is_over_limit, sample.turns) == (False, True, 2)
    assert sample.result is not None
    assert said in str(sample.result.reason)


async def test_a_reward_server_that_is_gone_ends_the_evaluation_and_not_the_episode(ground: Ground) -> None:
    async def gone(_items: list[RewardItem]) -> list[RewardResult]:
        raise DependencyLostError("away")

    with pytest.raises(DependencyLostError):
        await ground.play(chat, ["42"], scorer=gone)


async def test_the_guides_agent_with_anthropics_client_is_recorded(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shown] = [block for block in blocks(ROOT / "docs/guides/agents.md") if block.file == "my_anthropic_agent.py"]
    (tmp_path / "my_anthropic_agent.py").write_text(shown.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sample = await ground.play(load_agent("AGENT", "my_anthropic_agent:solve"), ["42"])
    assert (sample.turns, sample.completion, sample.is_correct) == (1, "42", True)


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"messages": [{"role": "user", "content": task["prompt"]}], "temperature": 2.0}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"])
"""


async def test_a_program_is_measured_as_a_function_is(ground: Ground) -> None:
    async with Relay(Program(f"{shlex.quote(sys.executable)} -S -c {shlex.quote(PROGRAM)}")) as agent:
        sample = await ground.play(agent, ["#### 42"], Kind.SAMPLED)
    assert sample.result == RewardResult(reward=1.0, extracted="42")
    assert (sample.turns, sample.completion) == (1, "#### 42")
    assert ground.engine.sampling[0]["temperature"] == 0.7
    async with Relay(Program(f"{shlex.quote(sys.executable)} -S -c '1 / 0'")) as agent:
        with pytest.raises(AgentFailedError, match=r"exited with code 1.*ZeroDivisionError"):
            await ground.play(agent)
    async with Relay(Program("echo 42")) as agent:
        with pytest.raises(AgentFailedError, match="a program asks OPENAI_BASE_URL"):
            await ground.play(agent)
