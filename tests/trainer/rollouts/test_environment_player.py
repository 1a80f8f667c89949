"""Episodes of an environment-server as training data: the model plays through a gateway that says what tests want."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from services.clients.data import DataClient
from services.clients.environment import EnvironmentClient
from services.clients.gateway import GatewayClient
from services.clients.reward import RewardClient
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import ServiceThread
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from services.gateway.requests import ChatRequest
from services.gateway.sessions import Session
from services.http.problems import ProblemError
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardStatus
from services.protocol.sessions import CreateSessionRequest
from tests.fake_service import fake_service
from tests.services.clients.playing import guess
from tests.services.clients.test_environment import address_of
from tests.services.conftest import StartService
from tests.services.conftest import start_service as start_service  # a fixture
from tests.services.conftest import start_service_once as start_service_once  # a fixture
from tests.services.run_page.serving import served_ready
from tests.trainer.rollouts.fake_gateway import FakeGateway, ids
from tests.waiting import IDLE_SECONDS
from trainer.config import TrainerSettings
from trainer.rollouts.game import FixedModel, Games
from trainer.rollouts.groups import LEAST_FAILURES, GroupMaker, make_groups

ODD = "tests.services.environment_server.odd_environments:"
PROMPT = Prompt(id="seeds/train/5", prompt="The episode of seed 5", ground_truth="5", epoch=0, position=3)


@dataclass
class Stage:
    gateway: FakeGateway
    data: DataClient
    rewards: RewardClient
    gateway_client: GatewayClient
    environments: EnvironmentClient
    thread: ServiceThread
    opponent: FixedModel | None = None

    def sampler(self, settings: TrainerSettings) -> Games:
        return Games(settings, self.rewards, self.gateway_client, self.environments, self.opponent)

    def maker(self, **fields: Any) -> GroupMaker:
        wanted = {"rollout": "environment", "group_size": 2, "max_new_tokens": 9}
        settings = TrainerSettings.load(**(wanted | fields))
        return GroupMaker(settings, self.sampler(settings))

    def group(self, prompt: Prompt = PROMPT, **fields: Any) -> Group:
        made = self.thread.call(self.maker(**fields).make_group(prompt))
        assert made is not None
        return made


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    name = getattr(request, "param", "guessing")
    turns = 3 if name == "guessing" else None
    settings = EnvironmentSettings(environment=name, environment_max_steps=turns, environment_server_name="a")
    with served_ready(create_app(settings)) as url, stage_of(url) as stage:
        yield stage


@contextmanager
def stage_of(*environment_servers: str) -> Iterator[Stage]:
    """A stage with environment-servers at these URLs."""
    gateway = FakeGateway(lambda messages: "50")
    with ExitStack() as stack:
        data, rewards, served = (stack.enter_context(fake_service(routes)) for routes in ({}, {}, gateway))
        environments = EnvironmentClient([address_of(url) for url in environment_servers], deadline=IDLE_SECONDS)
        data_client, reward_client = DataClient(data.endpoint), RewardClient(rewards.endpoint)
        gateway_client = GatewayClient(served.endpoint, deadline=30)
        thread = stack.enter_context(ServiceThread())
        for client in (data_client, reward_client, gateway_client, environments):
            thread.call(client.__aenter__())
            stack.callback(lambda client=client: thread.call(client.__aexit__(None, None, None)))
        yield Stage(gateway, data_client, reward_client, gateway_client, environments, thread)


@pytest.mark.parametrize(
    ("limit", "setting"),
    [
        ({"max_turns": 1}, "AGENT_MAX_TURNS"),
        ({"max_tokens": 1}, "AGENT_MAX_TOKENS"),
    ],
)
def test_an_episode_over_a_limit_says_what_its_environment_can_do(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any], setting: str
) -> None:
    session = Session(CreateSessionRequest(id="s", **limit), time.time())
    session.in_flight, session.reserved_tokens = MagicMock(__len__=lambda _: 1), 1
    with pytest.raises(ProblemError) as refused:
        session.admit(ChatRequest.of({"messages": [{"role": "user", "content": "50"}]}))
    monkeypatch.setattr(stage.gateway, "complete", lambda *_: (429, {"detail": refused.value.detail}))
    maker = stage.maker()
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    told = str(maker.last_failure)
    assert setting in told
    assert told.endswith("end the episode before with truncated=True, set ENVIRONMENT_MAX_STEPS, or raise this setting")


def test_the_model_plays_the_episode_of_the_prompts_seed(stage: Stage) -> None:
    stage.gateway.says = guess
    group = stage.group()
    assert len(group.sequences) == 2
    for experience in group.sequences:
        assert experience.messages is not None
        answers = [m.content for m in experience.messages if m.role == "user"][1:]
        assert len(answers) == 2, "nobody asks the model after the last one"
        assert set(answers) <= {"Higher.", "Lower."}
        texts = [token for m in experience.messages if m.role == "assistant" for token in ids(f"{m.content}\n")]
        assert experience.loss_mask is not None
        pairs = zip(experience.completion_ids, experience.loss_mask, strict=True)
        assert [token for token, is_sampled in pairs if is_sampled] == texts
    assert group.rewards == [0.0, 0.0]


def test_the_reward_is_the_episodes_return(stage: Stage) -> None:
    first = stage.group()
    assert first.sequences[0].messages is not None
    answer = first.sequences[0].messages[2].content
    span = range(51, 101) if answer == "Higher." else range(1, 50)
    counter = iter(span)
    returns: list[float] = []
    while not any(returns):
        stage.gateway.says = lambda _: str(next(counter, 0))
        group = stage.group(group_size=1, advantage="reinforce")
        returns.append(group.rewards[0])
    assert returns[-1] == 1.0
    turns = group.sequences[0].turns
    assert turns is not None
    assert [turn.reward for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]


@pytest.mark.parametrize("stage", [f"{ODD}Choosy"], indirect=True)
def test_a_refused_answer_is_a_turn_with_the_environments_answer(stage: Stage) -> None:
    stage.gateway.says = lambda messages: "yes" if len(messages) > 1 else "perhaps"
    group = stage.group()
    assert group.rewards == [1.0, 1.0]
    messages = group.sequences[0].messages
    assert messages is not None
    assert [(m.role, m.content) for m in messages] == [
        ("user", "Yes or no?"),
        ("assistant", "perhaps"),
        ("user", "answer yes or no"),
        ("assistant", "yes"),
    ]


@pytest.mark.parametrize("stage", [f"{ODD}Fragile"], indirect=True)
def test_a_lost_episode_has_no_reward(stage: Stage) -> None:
    stage.gateway.says = lambda messages: "break" if len(stage.gateway.sessions) == 1 else "well"
    maker = stage.maker(agent_concurrency=1)
    group = stage.thread.call(maker.make_group(PROMPT))
    assert group is not None
    lost, kept = group.sequences
    assert (lost.reward, lost.result.status) == (None, RewardStatus.ERROR)
    assert "it broke" in str(lost.result.reason)
    assert kept.reward == 1.0
    assert group.episodes_failed == {"environment": 1}
    assert group.failure_examples == {"environment": lost.result.reason}


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (f"{ODD}Fragile", "RuntimeError: it broke (.*odd_environments.py, line [0-9]+, in Fragile.step)"),
        pytest.param(
            f"{ODD}Unstable",
            "ZeroDivisionError: .*, in Unstable.step.*; the episode was lost 3 times at this action",
            marks=pytest.mark.slow,
        ),
    ],
    indirect=["stage"],
)
def test_an_environment_whose_every_episode_fails_ends_the_run_for_good(stage: Stage, said: str) -> None:
    stage.gateway.says = lambda _: "break"
    maker = stage.maker(batch_size=LEAST_FAILURES)
    assert stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES)) == []
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(").replace(")", r"\)")):
        stage.thread.call(make_groups({"": maker}, [PROMPT] * LEAST_FAILURES))


@pytest.mark.slow
def test_servers_outlive_an_environment_that_exits_at_some_seeds(start_service: StartService) -> None:
    servers = [
        start_service("services.environment_server", ENVIRONMENT=f"{ODD}Leaving", ENVIRONMENT_SERVER_NAME=name)
        for name in ("a", "b")
    ]
    with stage_of(*(server.url for server in servers)) as stage:
        stage.gateway.says = lambda _: "yes"
        prompts = [PROMPT.model_copy(update={"ground_truth": str(seed), "position": seed}) for seed in range(27)]
        maker = stage.maker(batch_size=27)
        groups = stage.thread.call(make_groups({"": maker}, prompts))
        assert [group.prompt.ground_truth for group in groups] == [str(seed) for seed in range(27) if seed % 9]
        assert all(group.rewards == [1.0, 1.0] for group in groups)
        assert "SystemExit: 1 (" in str(maker.last_failure)
        begun = [
            httpx.get(f"{server.url}/stats", trust_env=False, timeout=IDLE_SECONDS).json()["episodes"]
            for server in servers
        ]
        assert all(counts["terminated"] and counts["lost"] for counts in begun)
        assert [server.process.poll() for server in servers] == [None, None]


@pytest.mark.parametrize("stage", ["CartPole-v1"], indirect=True)
def test_an_environment_of_numbers_is_refused(stage: Stage) -> None:
    maker = stage.maker()
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    assert "a language model plays environments of messages and text" in str(maker.last_failure)
    assert isinstance(maker.all_failed(), ConfigurationError)


def test_a_prompt_that_is_not_a_seed_names_the_setting(stage: Stage) -> None:
    maker = stage.maker()
    assert stage.thread.call(maker.make_group(PROMPT.model_copy(update={"ground_truth": "1/2"}))) is None
    assert "set DATASET=seeds" in str(maker.last_failure)


def test_a_run_without_servers_ends_as_recoverable(stage: Stage) -> None:
    stage.environments = EnvironmentClient([], deadline=0.1)
    maker = stage.maker()
    assert stage.thread.call(maker.make_group(PROMPT)) is None
    assert isinstance(maker.all_failed(), DependencyLostError)
