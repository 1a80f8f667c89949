"""Groups of episodes: an agent plays through a gateway that says what each test wants."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from services.agents import Program, load_agent
from services.clients.agent_episodes import Episode
from services.clients.data import DataClient
from services.clients.gateway import GatewayClient
from services.clients.reward import RewardClient
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import ServiceThread
from services.protocol.chat import EpisodeFigures, Message
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardResult, RewardStatus
from services.protocol.sessions import DEADLINE, Trace
from services.relay import Relay
from services.run_page.directory import FIRST_FAILURE
from services.run_page.progress import Activity
from tests.fake_service import FakeService, fake_service
from tests.trainer.rollouts.fake_gateway import END, FakeGateway, ids
from trainer.config import Rollout, TrainerSettings
from trainer.rollouts.episodes import Agents, sequences_of
from trainer.rollouts.evaluate import Evaluator
from trainer.rollouts.groups import LEAST_FAILURES, GroupMaker, make_groups
from trainer.rollouts.service_calls import ServiceCalls

PROMPT = Prompt(id="p/0", prompt="6*7=", ground_truth="42", prompt_ids=[1], epoch=0, position=3)


class Talk:
    """A conversation with the model by plain HTTP, as any client has it."""

    def __init__(self, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> None:
        self.post = http_client.post
        self.url = f"{base_url}/chat/completions"
        self.headers = {"Authorization": f"Bearer {api_key}"}

    async def say(self, messages: list[dict[str, str]]) -> str:
        reply = await self.post(self.url, json={"model": "m", "messages": messages}, headers=self.headers)
        text: str = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        return text


async def two_turns(example: Any, **endpoint: Any) -> float | None:
    """Ask, give a tool's result, ask again, and score the last answer."""
    talk = Talk(**endpoint)
    messages = [{"role": "user", "content": example.prompt}]
    messages.append({"role": "assistant", "content": await talk.say(messages)})
    messages.append({"role": "tool", "content": "tool says 42"})
    return await example.score(await talk.say(messages))


async def compacting(example: Any, **endpoint: Any) -> float | None:
    """Forget the first turn before the second."""
    talk = Talk(**endpoint)
    notes = await talk.say([{"role": "user", "content": example.prompt}])
    return await example.score(await talk.say([{"role": "user", "content": f"{example.prompt} {notes}"}]))


async def endless(example: Any, **endpoint: Any) -> float | None:
    talk = Talk(**endpoint)
    while True:
        await talk.say([{"role": "user", "content": example.prompt}])


async def one_turn(example: Any, **endpoint: Any) -> float | None:
    return await example.score(await Talk(**endpoint).say([{"role": "user", "content": example.prompt}]))


async def broken(example: Any, **endpoint: Any) -> float | None:
    await one_turn(example, **endpoint)
    raise KeyError("a bug")


async def careful(example: Any, **endpoint: Any) -> float | None:
    """Fail after two turns."""
    await two_turns(example, **endpoint)
    raise KeyError("a bug")


async def sleepy(example: Any, **endpoint: Any) -> float | None:
    await one_turn(example, **endpoint)
    await asyncio.sleep(60)
    return 1.0


async def waiting(example: Any, **endpoint: Any) -> float | None:
    await asyncio.Event().wait()
    return 1.0


async def impatient(example: Any, **endpoint: Any) -> float | None:
    """Fail by a limit of its own, not of the episode."""
    await one_turn(example, **endpoint)
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)
    return 1.0


async def by_own_client(example: Any, **endpoint: Any) -> float | None:
    """Ask twice by another client than the episode's."""
    async with httpx.AsyncClient(timeout=None) as own_client:
        return await two_turns(example, **(endpoint | {"http_client": own_client}))


async def forgiving(example: Any, **endpoint: Any) -> float | None:
    """Return a reward although the last call was refused."""
    reward = await one_turn(example, **endpoint)
    with contextlib.suppress(httpx.HTTPStatusError):
        await one_turn(example, **endpoint)
    return reward


async def careless(example: Any, **endpoint: Any) -> float | None:
    """Hide the refusal of the second call behind an error of its own."""
    try:
        return await two_turns(example, **endpoint)
    except httpx.HTTPStatusError:
        raise ValueError("no answer") from None


async def wordy(example: Any, **endpoint: Any) -> Any:
    await one_turn(example, **endpoint)
    return "1.0"


async def unsure(example: Any, **endpoint: Any) -> None:
    await one_turn(example, **endpoint)


async def silent(example: Any, **endpoint: Any) -> float:
    return 1.0


async def paid_by_turn(example: Any, **endpoint: Any) -> float:
    """Give 0.25 for the first turn and nothing for the second; the episode has 1.0 in all."""
    await two_turns(example, **endpoint)
    example.turn_rewards += [0.25, 0.0]
    return 1.0


async def paid_by_branch(example: Any, **endpoint: Any) -> float:
    """Forget the first of three turns before the second."""
    talk = Talk(**endpoint)
    await compacting(example, **endpoint)
    await talk.say([{"role": "user", "content": f"{example.prompt} again"}])
    example.turn_rewards += [1.0, 2.0, 4.0]
    return 7.0


async def pays_one_turn_only(example: Any, **endpoint: Any) -> float:
    await two_turns(example, **endpoint)
    example.turn_rewards.append(1.0)
    return 1.0


@dataclass
class Stage:
    """The fakes and the clients that speak to them."""

    gateway: FakeGateway
    served: FakeService
    """The gateway's service, with its requests."""
    rewards: FakeService
    data: FakeService
    data_client: DataClient
    reward_client: RewardClient
    gateway_client: GatewayClient
    thread: ServiceThread
    stack: ExitStack

    def settings(self, agent: Any, /, **fields: Any) -> TrainerSettings:
        wanted = {"rollout": "agent", "agent": f"{__name__}:{agent.__name__}", "group_size": 2, "max_new_tokens": 9}
        return TrainerSettings.load(**(wanted | fields))

    def sampler(self, settings: TrainerSettings) -> Agents:
        if settings.rollout is not Rollout.PROGRAM:
            return Agents(settings, self.reward_client, self.gateway_client, load_agent("AGENT", settings.agent))
        relay = Relay(Program(settings.agent_command))
        self.thread.call(relay.__aenter__())
        self.stack.callback(lambda: self.thread.call(relay.__aexit__()))
        return Agents(settings, self.reward_client, self.gateway_client, relay)

    def maker(self, agent: Any, /, **fields: Any) -> GroupMaker:
        settings = self.settings(agent, **fields)
        return GroupMaker(settings, self.sampler(settings))

    def evaluator(self, settings: TrainerSettings) -> Evaluator:
        return Evaluator(settings, self.data_client, {"": self.sampler(settings)}, Activity())

    def group(self, agent: Any, prompt: Prompt = PROMPT, /, **fields: Any) -> Group:
        made = self.thread.call(self.maker(agent, **fields).make_group(prompt))
        assert made is not None
        return made


def score(request: dict[str, Any]) -> dict[str, Any]:
    """POST /batch_reward: the answer must be the ground truth."""
    return {"rewards": [{"reward": float(item["response"] == item["ground_truth"])} for item in request["items"]]}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("SHARED_DIR", str(tmp_path))
    gateway = FakeGateway(lambda messages: "42" if len(messages) > 1 else "call")
    with ExitStack() as stack:
        routes = ({}, {"POST /batch_reward": score, "GET /stats": lambda _: {}}, gateway)
        data, rewards, served = (stack.enter_context(fake_service(own)) for own in routes)
        data_client, reward_client = DataClient(data.endpoint), RewardClient(rewards.endpoint, deadline=30)
        gateway_client = GatewayClient(served.endpoint, deadline=30)
        thread = stack.enter_context(ServiceThread())
        for client in (data_client, reward_client, gateway_client):
            thread.call(client.__aenter__())
            stack.callback(lambda client=client: thread.call(client.__aexit__(None, None, None)))
        yield Stage(gateway, served, rewards, data, data_client, reward_client, gateway_client, thread, stack)


def test_an_episode_is_one_sequence_of_which_the_models_tokens_are_trained(stage: Stage) -> None:
    group = stage.group(two_turns)
    assert group.prompt_ids == ids(f"6*7={END}")
    assert [e.episode for e in group.sequences] == [0, 1]
    assert group.rewards == [1.0, 1.0]
    parts = [("call\n", True), ("tool says 42\n", False), ("42\n", True)]
    for e in group.sequences:
        assert e.completion_ids.tolist() == ids("".join(text for text, _ in parts))
        assert e.mask.tolist() == [is_sampled for text, is_sampled in parts for _ in text]
        assert {x for x, is_sampled in zip(e.logprobs, e.mask, strict=True) if is_sampled} == {-0.5}
        assert e.completion == "42"
        assert e.oldest_version == 1


def test_sessions_have_the_settings_of_training_and_seeds_of_their_own(stage: Stage) -> None:
    settings = {"temperature": 0.5, "agent_max_turns": 3, "agent_max_tokens": 50, "agent_seconds": 70.0, "seed": 5}
    stage.group(two_turns, **settings)
    stage.group(two_turns, **settings)
    requests = [session.request for session in stage.gateway.sessions.values()]
    assert len(requests) == 4, "another attempt at a prompt has sessions of its own"
    for request in requests:
        sampling = [request[name] for name in ("temperature", "max_turn_tokens", "max_turns", "max_tokens")]
        assert sampling == [0.5, 9, 3, 50]
        assert request["deadline_seconds"] == 140, "its calls may wait as long as it takes itself"
        assert request["group_id"].endswith("-0-3")
    seeds = [(request["index"], request["seed"]) for request in requests]
    assert len(set(seeds)) == 2, "equal seeds make equal groups"
    assert len({seed for _, seed in seeds}) == 2
    assert [session.reward for session in stage.gateway.sessions.values()] == [{"reward": 1.0, "reason": None}] * 4


def test_a_branch_is_another_sequence_of_its_episode_with_the_same_reward(stage: Stage) -> None:
    stage.gateway.says = lambda messages: "42" if "note" in messages[0]["content"] else "note"
    group = stage.group(compacting)
    assert group.prompt_ids == ids("6*7="), "the longest common prefix of all prompts"
    assert [e.episode for e in group.sequences] == [0, 0, 1, 1]
    assert group.rewards == [1.0, 1.0]
    first, second = group.episodes[0]
    assert (first.completion_ids.tolist(), first.mask.tolist()) == (ids("\nnote\n"), [False] + [True] * 5)
    assert (second.completion_ids.tolist(), second.mask.tolist()) == (ids(" note\n42\n"), [False] * 6 + [True] * 3)


def test_turns_have_the_rewards_that_the_agent_gave_and_the_last_one_the_rest(stage: Stage) -> None:
    group = stage.group(paid_by_turn)
    for e in group.sequences:
        turns = [(e.completion_ids[t.start : t.end].tolist(), t.number, t.reward) for t in e.turns or ()]
        assert turns == [(ids("call\n"), 0, 0.25), (ids("42\n"), 1, 0.75)]
    assert group.rewards == [1.0, 1.0]


def test_a_sequence_that_ends_has_the_rewards_of_later_sequences_in_its_last_turn(stage: Stage) -> None:
    group = stage.group(paid_by_branch)
    earned = [[(t.number, t.reward) for t in e.turns or ()] for e in group.episodes[0]]
    assert earned == [[(0, 7.0)], [(1, 6.0)], [(2, 4.0)]]
    assert [e.turns[0].start for e in group.episodes[0] if e.turns] == [1, 6, 7], "behind what the prompts do not share"


def test_parallel_calls_are_one_turn_to_the_formula_as_choices_are() -> None:
    """Three votes on one prompt, and the turn after one of them: 4 calls, 2 turns."""

    def sequence(*turns: dict[str, int]) -> dict[str, Any]:
        n = turns[-1]["end"]
        numbers = {"completion_ids": [7] * n, "logprobs": [-1.0] * n, "loss_mask": [True] * n, "prompt_ids": [1]}
        said = [{"role": "assistant", "content": "7", "sampled": True}]
        return {**numbers, "policy_versions": [1] * n, "finish_reason": "stop", "turns": list(turns), "messages": said}

    votes = [{"call": number, "number": 0, "start": 0, "end": 2} for number in range(3)]
    sequences = [
        sequence(votes[0]),
        sequence(votes[1], {"call": 3, "number": 1, "start": 2, "end": 5}),
        sequence(votes[2]),
    ]
    trace = Trace.model_validate(
        {"id": "s", "group_id": "g", "index": 0, "reward": 1.0, "reason": None, "sequences": sequences}
        | {"turns": 4, "sampled_tokens": 9}
    )
    episode = Episode(trace, RewardResult(reward=1.0), None, turn_rewards=[0.25, 0.25, 0.0, 0.5])
    _, experiences = sequences_of([episode])
    earned = [[(turn.number, turn.reward) for turn in e.turns or ()] for e in experiences]
    assert earned == [[(0, 1.0)], [(0, 0.5), (1, 0.5)], [(0, 1.0)]]


def test_rewards_that_are_not_one_a_turn_make_an_episode_fail(stage: Stage) -> None:
    maker = stage.maker(pays_one_turn_only)
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    assert "1 for 2 calls of the model" in str(maker.last_failure)


def test_tokens_of_a_branch_without_a_common_prompt_are_counted_as_lost(stage: Stage) -> None:
    async def lost() -> float:
        return REGISTRY.get_sample_value("trainer_episode_tokens_lost_total", {"reason": "no_common_prompt"}) or 0.0

    before = stage.thread.call(lost())
    stage.gateway.says = lambda messages: "x"
    group = stage.group(restarting)
    assert [e.episode for e in group.sequences] == [0, 1]
    assert stage.thread.call(lost()) == before + 2 * len("x\n")


async def restarting(example: Any, **endpoint: Any) -> float | None:
    talk = Talk(**endpoint)
    await talk.say([{"role": "user", "content": example.prompt}])
    await talk.say([{"role": "user", "content": "from the start"}])
    return 1.0


@pytest.mark.parametrize(
    ("agent", "reason", "status"),
    [
        (broken, "exception", RewardStatus.ERROR),
        (impatient, "exception", RewardStatus.ERROR),
        (endless, "limit", RewardStatus.OVER_LIMIT),
        (sleepy, "timeout", RewardStatus.OVER_LIMIT),
        (wordy, "reward", RewardStatus.ERROR),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_failed_episode_has_no_reward_unless_it_is_over_a_limit_and_says_why(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, agent: Any, reason: str, status: RewardStatus
) -> None:
    calls = 0

    async def fails_once(example: Any, **endpoint: Any) -> float | None:
        nonlocal calls
        calls += 1
        return await (agent if calls == 2 else one_turn)(example, **endpoint)

    monkeypatch.setitem(globals(), "failing", fails_once)
    fails_once.__name__ = "failing"
    # The three others end well before.
    seconds = 2 if agent is sleepy else 60
    group = stage.group(fails_once, group_size=4, agent_seconds=seconds, agent_max_turns=2, over_limit_reward=-1)
    outcomes = [first.result for first, *_ in group.episodes]
    assert [result.reward for result in outcomes].count(0.0) == 3
    [result] = [result for result in outcomes if result.reward != 0.0]
    assert result.reward == (-1.0 if status is RewardStatus.OVER_LIMIT else None)
    assert result.status is status
    assert group.episodes_failed == {reason: 1}
    told = [session.reward for session in stage.gateway.sessions.values() if session.reward]
    assert [reward["reason"] for reward in told if reward["reward"] is None] == [result.reason]


@pytest.mark.parametrize(
    ("agent", "reasons", "failed"),
    [
        (broken, ["length"], {"limit": 2}),
        (careful, ["length", "stop"], {"exception": 2}),
        (careful, ["stop", "length"], {"limit": 2}),
        (one_turn, ["length"], {}),
        (wordy, ["length"], {"reward": 2}),
    ],
)
def test_an_agent_that_fails_over_an_answer_that_was_cut_off_is_over_a_limit(
    stage: Stage, agent: Any, reasons: list[str], failed: dict[str, int]
) -> None:
    says = stage.gateway.says

    def said(messages: Any) -> str | int:
        stage.gateway.finish_reason = reasons[min(len(messages) // 2, len(reasons) - 1)]
        return says(messages)

    stage.gateway.says = said
    maker = stage.maker(agent)
    answers = stage.thread.call(maker.sampler.answer(PROMPT, SamplingParams(max_new_tokens=9), 2, 0))
    assert answers.failed == failed
    statuses = {sequence.scoring.status is RewardStatus.OVER_LIMIT for sequence in answers.sequences}
    assert statuses == {"limit" in failed}


def test_an_answer_that_cannot_be_scored_is_no_failure_of_the_agent(stage: Stage) -> None:
    group = stage.group(unsure)
    assert [e.reward for e in group.sequences] == [None, None]
    assert group.episodes_failed == {"no_reward": 2}


def test_a_group_also_tells_of_the_failed_episodes_of_prompts_without_a_group(stage: Stage) -> None:
    maker = stage.maker(broken)
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    assert isinstance(maker.sampler, Agents)
    maker.sampler.agent = one_turn
    group, after = (stage.thread.call(maker.make_group(PROMPT)) for _ in range(2))
    assert group is not None
    assert after is not None
    assert (group.episodes_failed, group.failure_examples) == ({"exception": 2}, {"exception": str(maker.last_failure)})
    assert after.episodes_failed == {}, "each is told once"


def test_an_episode_has_its_figures_and_each_sequence_its_conversation(stage: Stage) -> None:
    stage.gateway.says = lambda messages: "42" if "note" in messages[0]["content"] else "note"
    group = stage.group(compacting)
    assert group.episode_figures == {number: EpisodeFigures(turns=2, branches=1) for number in (0, 1)}
    for first, second in group.episodes:
        assert first.messages == [
            Message(role="user", content="6*7="),
            Message(role="assistant", content="note", sampled=True),
        ]
        assert second.messages is not None
        assert [message.content for message in second.messages] == ["6*7= note", "42"]
        assert [message.is_last for message in second.messages] == [False, True]


@pytest.mark.parametrize("agent", [broken, silent, waiting], ids=lambda agent: agent.__name__)
def test_an_agent_of_which_every_episode_fails_ends_the_run(stage: Stage, agent: Any) -> None:
    maker = stage.maker(agent, batch_size=4, agent_seconds=0.5 if agent is waiting else 60)
    for _ in range(LEAST_FAILURES - 1):
        assert stage.thread.call(maker.make_group(PROMPT)) is None
    maker.check()
    said = {
        "broken": r"KeyError: 'a bug' \(.*test_episodes\.py, line \d+, in broken\)",
        "silent": "never called the model",
        "waiting": "the agent made no call within AGENT_SECONDS=0.5; raise it, or see where the agent waits",
    }[agent.__name__]
    with pytest.raises(
        ConfigurationError, match=f"every episode of {LEAST_FAILURES} prompts in a row failed: .*{said}"
    ):
        stage.thread.call(make_groups({"": maker}, [PROMPT]))


def test_a_reward_function_that_fails_at_every_answer_of_an_agent_ends_the_run(stage: Stage, tmp_path: Path) -> None:
    failed = {"reward": None, "status": "error", "reason": "mine:score: KeyError: 'x' (mine.py, line 3, in score)"}
    stage.rewards.routes["POST /batch_reward"] = lambda request: {"rewards": [failed] * len(request["items"])}
    maker = stage.maker(one_turn, batch_size=4, shared_dir=tmp_path)
    maker.settings.run_dir.mkdir(parents=True)
    assert stage.thread.call(make_groups({"": maker}, [PROMPT] * 4)) == []
    assert maker._failed == {"reward_error": 8}
    assert (maker.settings.run_dir / FIRST_FAILURE).read_text() == f"reward_error: {failed['reason']}\n"
    with pytest.raises(ConfigurationError, match=r"every episode of 8 prompts in a row failed: mine:score: KeyError"):
        stage.thread.call(make_groups({"": maker}, [PROMPT] * 4))


@pytest.mark.parametrize("limit", [{"agent_max_turns": 1}, {"agent_seconds": 6}], ids=str)
def test_groups_of_which_every_episode_is_over_a_limit_are_wrong_and_do_not_end_the_run(
    stage: Stage, limit: dict[str, Any]
) -> None:
    maker = stage.maker(endless if "agent_max_turns" in limit else sleepy, batch_size=LEAST_FAILURES, **limit)
    groups = stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES))
    assert [group.rewards for group in groups] == [[0.0, 0.0]] * LEAST_FAILURES
    reason = "limit" if "agent_max_turns" in limit else "timeout"
    assert sum((Counter(group.episodes_failed) for group in groups), Counter()) == {reason: 2 * LEAST_FAILURES}
    assert not (maker.settings.run_dir / FIRST_FAILURE).exists()


@pytest.mark.parametrize("status", ["over_limit", "timeout"])
def test_an_episode_whose_answer_the_verifier_did_not_judge_is_wrong_only_over_its_limits(
    stage: Stage, status: str
) -> None:
    result = {"reward": None, "status": status, "reason": "said"}
    stage.rewards.routes["POST /batch_reward"] = lambda request: {"rewards": [result] * len(request["items"])}
    group = stage.group(two_turns)
    is_wrong = status == "over_limit"
    assert [e.reward for e in group.sequences] == ([0.0] * 2 if is_wrong else [None] * 2)
    assert group.episodes_failed == ({"reward_over_limit": 2} if is_wrong else {"no_reward": 2})


@pytest.mark.parametrize("agent", [two_turns, by_own_client], ids=lambda agent: agent.__name__)
def test_the_time_that_calls_wait_for_engines_is_not_the_episodes(
    stage: Stage, agent: Any, waits_in_slow_motion: None
) -> None:
    """Each call takes longer than AGENT_SECONDS, also those of a client that only the gateway sees."""

    def says(messages: list[dict[str, Any]]) -> str:
        time.sleep(1.2)
        return "42" if len(messages) > 1 else "call"

    stage.gateway.says = says
    stage.gateway.counts_waits = agent is by_own_client
    group = stage.group(agent, agent_seconds=1.0)
    assert (group.rewards, group.episodes_failed) == ([1.0, 1.0], {})


@pytest.mark.parametrize("agent", [two_turns, careless, forgiving], ids=lambda agent: agent.__name__)
def test_an_episode_whose_last_call_no_engine_answered_has_no_reward(stage: Stage, agent: Any) -> None:
    """Whatever the agent makes of the refusal; its first call was answered."""
    told = Counter[str]()
    stage.gateway.limit = DEADLINE

    def says(messages: list[dict[str, Any]]) -> str | int:
        told["calls"] += 1
        return "42" if told["calls"] == 1 else 429

    stage.gateway.says = says
    maker = stage.maker(agent, group_size=1, advantage="reinforce")
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    assert maker._failed == {"server": 1}
    assert "no engine answered the last call" in str(maker.last_failure)
    assert isinstance(maker.all_failed(), DependencyLostError)


@pytest.mark.parametrize("is_program", [False, True])
def test_an_agent_that_fails_because_the_gateway_is_lost_ends_the_run_as_recoverable(
    stage: Stage, two_turns_program: dict[str, Any], is_program: bool
) -> None:
    stage.gateway.says = lambda _: 503
    fields = {"group_size": 1, "advantage": "reinforce", "service_deadline_seconds": 1}
    maker = stage.maker(one_turn, **fields, **(two_turns_program if is_program else {}))
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    assert "503" in str(maker.last_failure)
    assert isinstance(maker.all_failed(), DependencyLostError)


TWO_TURNS = """
import json, os, sys, urllib.request

task, messages = json.load(sys.stdin), []
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
for role, content in (("user", task["prompt"]), ("tool", "tool says 42")):
    messages.append({"role": role, "content": content})
    body = json.dumps({"model": task["model"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
answer = messages[-1]["content"]
print(answer)
if task["ground_truth"] != "42":
    os.write(int(os.environ["GRPO_REWARD_FD"]), b'{"reward": 0.5}')
"""


@pytest.fixture
def two_turns_program(tmp_path: Path) -> dict[str, Any]:
    """Settings by which a program in Python plays as ``two_turns`` does."""
    path = tmp_path / "program.py"
    path.write_text(TWO_TURNS)
    command = shlex.join([sys.executable, "-S", str(path)])
    return {"rollout": "program", "agent": None, "agent_command": command}


def test_a_program_plays_the_same_episodes_as_a_function(stage: Stage, two_turns_program: dict[str, Any]) -> None:
    played, wanted = stage.group(one_turn, **two_turns_program), stage.group(two_turns)
    assert played == wanted
    group = stage.group(one_turn, PROMPT.model_copy(update={"ground_truth": "unknown"}), **two_turns_program)
    assert group.rewards == [0.5, 0.5]


def test_a_program_that_ends_over_a_limit_has_failed_by_the_limit(
    stage: Stage, two_turns_program: dict[str, Any]
) -> None:
    settings = {"agent_max_turns": 1, "group_size": 1, "advantage": "reinforce"}
    group = stage.group(one_turn, **settings, **two_turns_program)
    assert (group.rewards, group.episodes_failed) == ([0.0], {"limit": 1})
    [session] = stage.gateway.sessions.values()
    assert session.reward is not None
    assert "HTTP Error 429" in session.reward["reason"]


def test_a_program_that_cannot_be_run_ends_the_run_with_its_output(stage: Stage) -> None:
    maker = stage.maker(
        one_turn, rollout="program", agent=None, agent_command="no-such-agent", batch_size=LEAST_FAILURES
    )
    assert stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES)) == []
    with pytest.raises(ConfigurationError, match=r"exited with code 127.*no-such-agent.*evaluate --agent-command"):
        stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES))


def test_an_episode_takes_two_requests_besides_the_agents(stage: Stage) -> None:
    stage.group(two_turns, group_size=4)
    asked = Counter(re.sub(r"/sessions/[\w.-]+", "/sessions/ID", route) for route, _ in stage.served.requests)
    assert asked == {"POST /sessions": 4, "POST /sessions/ID/finish": 4, "POST /sessions/ID/v1/chat/completions": 8}


def test_sessions_are_deleted_once_their_traces_are_here(stage: Stage) -> None:
    stage.group(two_turns)
    first = set(stage.gateway.sessions)
    stage.group(two_turns)
    assert set(stage.gateway.deleted) >= first, "with the requests that finish the next ones"
    stage.thread.call(stage.gateway_client.__aexit__(None, None, None))
    assert sorted(stage.gateway.deleted) == sorted(stage.gateway.sessions), "the last ones when the client closes"


@pytest.mark.parametrize(("rank", "name"), [(0, None), (8, "policy")])
def test_the_trained_adapter_is_that_of_the_sessions(stage: Stage, rank: int, name: str | None) -> None:
    stage.group(one_turn, lora_rank=rank)
    assert {session.request["lora_path"] for session in stage.gateway.sessions.values()} == {name}


def test_at_most_agent_concurrency_episodes_are_played_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def counting(example: Any, **endpoint: Any) -> float | None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        reward = await two_turns(example, **endpoint)
        now -= 1
        return reward

    monkeypatch.setitem(globals(), "counting", counting)
    stage.group(counting, group_size=8, agent_concurrency=3)
    assert most == 3


@pytest.mark.parametrize(("status", "error"), [(503, DependencyLostError), (422, ConfigurationError)])
def test_a_gateway_that_makes_no_sessions_ends_the_run(stage: Stage, status: int, error: type[Exception]) -> None:
    stage.gateway["POST /sessions"] = lambda _: status
    stage.gateway_client.deadline = 2 if status == 503 else 30
    maker = stage.maker(one_turn, batch_size=LEAST_FAILURES)
    with pytest.raises(error, match="gateway"):
        stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES))


def test_a_reward_server_that_is_lost_ends_the_run(stage: Stage) -> None:
    stage.rewards.routes["POST /batch_reward"] = lambda _: 503
    stage.reward_client.deadline = 1
    with pytest.raises(DependencyLostError, match="reward-server"):
        stage.group(one_turn)


def compared(request: dict[str, Any]) -> dict[str, Any]:
    """POST /batch_reward of a group: what is added to the agents' own rewards grows with the place."""
    assert request["is_group"]
    own = request["own_rewards"]
    parts = [{"agent": reward, "judge_group": place / 4} for place, reward in enumerate(own)]
    return {"rewards": [{"reward": sum(part.values()), "components": part} for part in parts]}


async def generous(example: Any, **endpoint: Any) -> float:
    """Give rewards of its own, one a turn; one episode fails."""
    talk = Talk(**endpoint)
    messages = [{"role": "user", "content": example.prompt}]
    messages.append({"role": "assistant", "content": await talk.say(messages)})
    messages.append({"role": "tool", "content": "tool says 42"})
    await talk.say(messages)
    generous_calls.append(0)
    if len(generous_calls) == 2:
        raise KeyError("a bug")
    example.turn_rewards += [0.25, 0.0]
    return 0.5


generous_calls: list[int] = []


def test_a_judge_compares_the_episodes_of_a_group_after_the_last_has_ended(stage: Stage) -> None:
    stage.rewards.routes |= {"GET /stats": lambda _: {"relative": [""]}, "POST /batch_reward": compared}
    generous_calls.clear()
    group = stage.group(generous, group_size=4)
    [asked] = stage.rewards.asked("POST /batch_reward")
    assert asked["own_rewards"] == [0.5] * 3, "a failed episode is not sent"
    transcript = "[assistant]\ncall\n\n[tool]\ntool says 42\n\n[assistant]\n42"
    assert [item["response"] for item in asked["items"]] == [transcript] * 3
    by_episode = {e.episode: e.scoring for e in group.sequences}
    assert sorted(r.reward for r in by_episode.values() if r.reward is not None) == [0.5, 0.75, 1.0]
    assert sum(r.reward is None for r in by_episode.values()) == 1
    for e in group.sequences:
        if e.reward is not None:
            assert e.scoring.components["agent"] == 0.5
            assert sum(turn.reward for turn in e.turns or ()) == pytest.approx(e.reward)
    assert len(stage.rewards.asked("GET /stats")) == 1


def test_an_agent_that_scores_itself_alone_is_refused_where_a_judge_compares(stage: Stage) -> None:
    stage.rewards.routes |= {"GET /stats": lambda _: {"relative": [""]}}
    maker = stage.maker(two_turns, batch_size=1)
    with pytest.raises(
        ConfigurationError, match=r"judge_group compares the answers of a whole group, but example\.score"
    ):
        stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES))
    assert stage.rewards.asked("POST /batch_reward") == []


def test_an_evaluation_compares_nothing(stage: Stage) -> None:
    stage.rewards.routes |= {"GET /stats": lambda _: {"relative": [""]}, "POST /batch_reward": compared}
    generous_calls[:] = [0, 0]
    stage.data.routes["POST /prompts"] = lambda _: {
        "prompts": [PROMPT.model_dump()],
        "cursor": {},
        "total_available": 1,
    }
    metrics = stage.thread.call(stage.evaluator(stage.settings(generous, eval_prompts=1)).evaluate())
    assert metrics["eval_reward"] == 0.5, "the agent's own"
    assert stage.rewards.asked("POST /batch_reward") == []


def test_an_evaluation_plays_the_agent_greedily(stage: Stage) -> None:
    prompts = [PROMPT.model_copy(update={"id": f"p/{i}", "ground_truth": str(41 + i % 2)}) for i in range(6)]
    stage.data.routes["POST /prompts"] = lambda _: {
        "prompts": [prompt.model_dump() for prompt in prompts],
        "cursor": {},
        "total_available": 6,
    }
    evaluator = stage.evaluator(stage.settings(two_turns, eval_prompts=6))
    metrics = stage.thread.call(evaluator.evaluate())
    assert (metrics["accuracy"], metrics["eval_prompts"], metrics["eval_left_out"]) == (0.5, 6, 0)
    assert {session.request["temperature"] for session in stage.gateway.sessions.values()} == {0.0}
    assert [sample["completion"] for sample in evaluator.samples] == ["42"] * 6


@pytest.mark.parametrize(
    ("agent", "said"),
    [("nowhere:solve", "AGENT is 'nowhere:solve', which cannot be imported"), ("json:loads", "is not an `async def`")],
)
def test_an_agent_that_cannot_be_had_ends_the_run_at_its_start(stage: Stage, agent: str, said: str) -> None:
    settings = stage.settings(one_turn, agent=agent)
    # Before it waits for any service; none runs here.
    with pytest.raises(ConfigurationError, match=said), ServiceCalls.connected(settings, stage.thread, vocab_size=1000):
        pytest.fail("connected")


SECRET = PROMPT.model_copy(update={"row": b'{"tests": ["hidden"], "level": 2, "repository": "r"}'})


async def tells_what_it_sees(example: Any, **endpoint: Any) -> float | None:
    assert example.row == {"level": 2}
    assert "hidden" not in f"{example!r} {example.model_dump_json()} {example.model_dump()}"
    return await two_turns(example, **endpoint)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "rollout": "program",
            "agent": None,
            "agent_command": """case "$(cat)" in *hidden*) exit 1;; *'"row":{"level":2}'*) echo 42;; esac""",
        },
    ],
)
def test_an_agent_sees_the_columns_that_are_named_and_its_reward_the_whole_row(
    stage: Stage, fields: dict[str, Any]
) -> None:
    maker = stage.maker(tells_what_it_sees, agent_columns="level,absent", **fields)
    stage.thread.call(maker.make_group(SECRET))
    requests = stage.rewards.asked("POST /batch_reward")
    assert [request["rows"] for request in requests] == [{"0": SECRET.row.decode()}] * 2
    items = [item for request in requests for item in request["items"]]
    assert [(item["response"], item["row"]) for item in items] == [("42", "0")] * 2
