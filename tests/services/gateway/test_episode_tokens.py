"""The tokens of episodes: those that the real engine sampled, the real gateway recorded and the trainer is given."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.clients.gateway import GatewayClient
from services.core.endpoints import Endpoint
from services.embedded_engine.app import create_app as create_engine_app
from services.engines.engine import Embedded
from services.engines.settings import RolloutSettings
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult
from services.protocol.sessions import CreateSessionRequest
from services.weights.policy_store import ADAPTER_NAME
from tests.adapters import adapted_logprobs, save_adapter
from tests.e2e import agents
from tests.services.gateway.client_service import serving_gateway
from tests.services.run_page.serving import served_ready
from tests.trainer.tiny import plain_logprobs, plain_model
from tests.waiting import IDLE_SECONDS, wait_until
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.rollouts.episodes import Agents
from trainer.rollouts.groups import GroupMaker, make_groups

PROMPTS = [
    Prompt(id=f"p/{i}", prompt=question, ground_truth="7", position=i)
    for i, question in enumerate(["3+4=", "9-2=", "1+6=", "8-4="])
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[str]:
    """The URL of an engine."""
    with served_ready(create_engine_app(RolloutSettings(model_name=str(tiny_model), engine_dtype="float32"))) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(engine: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway in front of the engine."""
    with serving_gateway(tiny_model, engine, tmp_path_factory.mktemp("gateway")) as url:
        yield url


class OneDigit:
    """A reward-server in this process: an answer of one digit is right."""

    async def is_relative(self, source: str) -> bool:
        return False

    async def score(self, items: list[RewardItem], *, tries: int = 1) -> list[RewardResult]:
        return [RewardResult(reward=float(len(item.response) == 1)) for item in items]


def play(agent: Callable[..., Any], gateway: str, model: Path, **fields: Any) -> list[Group]:
    """Return the groups of PROMPTS that the agent plays."""
    settings = settings_for(agent, model, **fields)

    async def groups() -> list[Group]:
        async with GatewayClient(endpoint_of(gateway)) as client:
            maker = GroupMaker(settings, Agents(settings, OneDigit(), client, agent))  # type: ignore[arg-type]
            return await make_groups({"": maker}, PROMPTS)

    return asyncio.run(groups())


def settings_for(agent: Callable[..., Any], model: Path, **fields: Any) -> TrainerSettings:
    name = f"{agents.__name__}:{agent.__name__}"
    wanted = {"rollout": "agent", "agent": name, "group_size": 4, "max_new_tokens": 6, "model_name": str(model)}
    return TrainerSettings.load(**(wanted | fields))


def endpoint_of(url: str) -> Endpoint:
    return Endpoint("127.0.0.1", int(url.rpartition(":")[2]))


def engine_tokens(engine: str) -> int:
    return int(httpx.get(f"{engine}/stats", trust_env=False, timeout=IDLE_SECONDS).json()["generated_tokens"])


def recorded_tokens(gateway: str) -> tuple[int, int]:
    """Return the tokens that the gateway recorded, and those that it counted as lost."""
    text = httpx.get(f"{gateway}/metrics", trust_env=False, timeout=IDLE_SECONDS).text
    sampled = re.findall(r"^gateway_sampled_tokens_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    lost = re.findall(r"^gateway_lost_tokens_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, sampled))), int(sum(map(float, lost)))


@pytest.mark.parametrize("agent", [agents.twice, agents.moody, agents.hasty], ids=lambda agent: agent.__name__)
def test_every_token_that_the_engine_sampled_is_in_one_sequence_or_counted_as_lost(
    engine: str, gateway: str, tiny_model: Path, agent: Callable[..., Any]
) -> None:
    sampled_before, lost_before = recorded_tokens(gateway)
    engine_before = engine_tokens(engine)
    groups = play(agent, gateway, tiny_model)
    assert len(groups) == len(PROMPTS)

    def adds_up() -> bool:
        sampled, lost = recorded_tokens(gateway)
        return engine_tokens(engine) - engine_before == sampled - sampled_before + lost - lost_before

    # A call that its agent left may still be sampled.
    wait_until(adds_up, "the engine's tokens in the gateway's records")
    sampled, lost = recorded_tokens(gateway)
    trained = sum(e.trained_tokens for group in groups for e in group.sequences)
    assert trained == sampled - sampled_before
    assert lost == lost_before or agent is agents.hasty


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_model_gives_every_trained_token_the_recorded_log_probability(
    gateway: str, tiny_model: Path, temperature: float
) -> None:
    settings = settings_for(agents.moody, tiny_model, temperature=temperature)
    groups = play(agents.moody, gateway, tiny_model, temperature=temperature)
    model = plain_model(tiny_model)
    checked = 0
    for group in groups:
        scored = Objective(settings).training_group(group)
        for sequence, logprobs in zip(scored.sequences, plain_logprobs(model, scored, temperature), strict=True):
            recorded = sequence.trained(sequence.logprobs).tolist()
            assert sequence.trained(logprobs.detach().numpy()).tolist() == pytest.approx(recorded, abs=1e-4)
            checked += len(recorded)
    assert checked > 50


def test_episodes_that_fork_are_several_sequences_and_others_are_one(gateway: str, tiny_model: Path) -> None:
    assert {len(e) for group in play(agents.twice, gateway, tiny_model) for e in group.episodes} == {1}
    forked = play(agents.hasty, gateway, tiny_model)
    assert {len(e) for group in forked for e in group.episodes} == {2}
    for sequences in (sequences for group in forked for sequences in group.episodes):
        assert sequences[0].reward == sequences[1].reward
        first_turns = [bool(e.mask[0]) for e in sequences]
        assert sorted(first_turns) == [False, True], "the first turn is trained on in one of them"


async def test_an_adapter_that_changes_in_mid_episode_has_the_tokens_that_it_sampled(
    engine: str, gateway: str, tiny_model: Path, tmp_path: Path
) -> None:
    adapters = {
        version: save_adapter(tiny_model, tmp_path / str(version), seed=version, size=0.1) for version in (1, 2)
    }
    async with (
        Embedded(engine, timeout=IDLE_SECONDS) as worker,
        GatewayClient(endpoint_of(gateway)) as client,
        httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as http,
    ):
        request = CreateSessionRequest(id="adapted", seed=1, max_turn_tokens=4, lora_path=ADAPTER_NAME)
        await client.create(request)
        messages: list[dict[str, str]] = []
        for version, question in ((1, "3+4="), (2, "9-2="), (2, "5+5=")):
            await worker.load_adapter(adapters[version], version)
            messages.append({"role": "user", "content": question})
            reply = await http.post(f"{client.agent_url(request.id)}/chat/completions", json={"messages": messages})
            messages.append(reply.raise_for_status().json()["choices"][0]["message"])
        [sequence] = (await client.finish(request.id, 1.0)).sequences
    versions = sequence.policy_versions.tolist()
    ids = sequence.prompt_ids + sequence.completion_ids.tolist()
    wanted = {v: adapted_logprobs(tiny_model, path, ids)[-len(versions) :] for v, path in adapters.items()}
    sampled = [place for place, is_sampled in enumerate(sequence.mask) if is_sampled]
    assert {versions[place] for place in sampled} == {1, 2}
    for place in sampled:
        assert abs(wanted[versions[place]][place] - sequence.logprobs[place]) < 1e-4
    assert max(abs(wanted[1][place] - wanted[2][place]) for place in sampled) > 1e-2, "the adapters differ"
