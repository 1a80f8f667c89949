"""Games of several seats as training data: self-play, and a seat against a fixed model or an earlier version."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import reduce
from operator import xor
from typing import Any

import pytest

from services.clients.games import Seat
from services.core.errors import ConfigurationError, DependencyLostError
from services.environment_server.app import create_app
from services.environment_server.games import NAMES, draw_heaps
from services.environment_server.settings import EnvironmentSettings
from services.protocol.groups import Group, TokenSequence, Turn
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardStatus
from services.run_page.progress import Activity
from tests.fake_service import FakeService, fake_service
from tests.sequences import trained_sequence
from tests.services.run_page.serving import served_ready
from tests.trainer.rollouts.fake_gateway import ids
from tests.trainer.rollouts.test_environment_player import Stage, stage_of
from tests.waiting import IDLE_SECONDS
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.reporting.metrics import _measure
from trainer.reporting.step_metrics import group_metrics
from trainer.rollouts.evaluate import Evaluator
from trainer.rollouts.game import FixedModel

Messages = list[dict[str, Any]]


def prompt_of(seed: int) -> Prompt:
    return Prompt(id=f"seeds/train/{seed}", prompt=f"seed {seed}", ground_truth=str(seed), epoch=0, position=seed)


def heaps_of(messages: Messages) -> list[int]:
    """Return the heaps that the last message tells."""
    return [int(stones) for stones in re.findall(r"[ABC]: (\d)", messages[-1]["content"])]


def optimal(messages: Messages) -> str:
    """Return a move that wins, or else one stone of the first heap with any."""
    heaps = heaps_of(messages)
    value = reduce(xor, heaps)
    wins = [(i, stones - (stones ^ value)) for i, stones in enumerate(heaps) if stones ^ value < stones]
    heap, stones = (wins or [(i, 1) for i, stones in enumerate(heaps) if stones])[0]
    return f"{NAMES[heap]}{stones}"


def seed_won_by(seat: int, parity: int | None = None) -> int:
    """Return a seed whose game the seat wins; its remainder by two is ``parity``, unless that is None."""
    return next(
        seed for seed in range(200) if (reduce(xor, draw_heaps(seed)) == 0) == bool(seat) and parity in (None, seed % 2)
    )


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A job group whose environment-server has Nim, and whose model plays optimally."""
    name = getattr(request, "param", "nim")
    app = create_app(EnvironmentSettings(environment=name, environment_server_name="a"))
    with served_ready(app) as url, stage_of(url) as made:
        made.gateway.says = optimal
        yield made


@pytest.mark.parametrize("winner", [0, 1])
def test_self_play_trains_both_seats_with_their_own_tokens_and_rewards(stage: Stage, winner: int) -> None:
    group = stage.group(prompt_of(seed_won_by(winner)))
    assert [e.episode for e in group.sequences] == [0, 1, 2, 3]
    assert [e.seat for e in group.sequences] == [0, 1, 0, 1]
    assert group.rewards == ([1.0, -1.0] if winner == 0 else [-1.0, 1.0]) * 2
    for experience in group.sequences:
        messages = experience.messages
        assert messages is not None
        assert [m.role for m in messages[3:]] == ["user", "assistant"] * (len(messages[3:]) // 2)
        own = [token for m in messages[3:] if m.role == "assistant" for token in ids(f"{m.content}\n")]
        assert experience.loss_mask is not None
        pairs = zip(experience.completion_ids, experience.loss_mask, strict=True)
        assert [token for token, is_sampled in pairs if is_sampled] == own
    sessions = [session.request for session in stage.gateway.sessions.values()]
    assert sorted(request["index"] for request in sessions) == [0, 1, 2, 3]
    assert len({request["seed"] for request in sessions}) == 4


def test_the_metrics_have_the_figures_of_the_environment_and_the_wins_of_each_seat(stage: Stage) -> None:
    group = stage.group(prompt_of(seed_won_by(1)))
    metrics = group_metrics([group], 1)
    assert (metrics["environment_legal_moves"], metrics["environment_optimal_moves"]) == (1.0, 1.0)
    assert (metrics["win_rate_seat_0"], metrics["win_rate_seat_1"]) == (0.0, 1.0)
    for column in ("environment_legal_moves", "eval_environment_legal_moves", "win_rate_seat_1"):
        assert _measure(column) is not None, "it is exported"
    stage.gateway.says = lambda messages: "hm" if len(messages) < 6 else optimal(messages)
    group = stage.group(prompt_of(seed_won_by(1)))
    assert 0 < group_metrics([group], 1)["environment_legal_moves"] < 1


def test_a_game_counts_for_a_seat_that_never_acted(stage: Stage) -> None:
    stage.gateway.says = lambda _: "hm"
    group = stage.group(prompt_of(3))
    assert {experience.seat for experience in group.sequences} == {0}
    metrics = group_metrics([Group.model_validate_json(group.model_dump_json())], 1)
    assert (metrics["win_rate_seat_0"], metrics["win_rate_seat_1"]) == (0.0, 1.0)


def test_an_evaluation_has_the_figures_of_greedy_games(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prompts(_: Evaluator, _source: str) -> list[Prompt]:
        return [prompt_of(seed) for seed in range(3)]

    monkeypatch.setattr(Evaluator, "_prompts", prompts)
    settings = TrainerSettings.load(rollout="environment", max_new_tokens=9)
    evaluator = Evaluator(settings, stage.data, {"": stage.sampler(settings)}, Activity())
    metrics = stage.thread.call(evaluator.evaluate())
    assert (metrics["eval_environment_legal_moves"], metrics["eval_environment_optimal_moves"]) == (1.0, 1.0)
    assert (metrics["eval_prompts"], metrics["eval_left_out"]) == (3, 0)
    assert metrics["accuracy"] == 0.5, "one seat of two wins each game"
    assert len(evaluator.samples) == 6


def test_turns_of_two_seats_are_not_compared() -> None:
    def played(seat: int, *rewards: float) -> TokenSequence:
        turns = [Turn(number=i, start=i, end=i + 1, reward=reward) for i, reward in enumerate(rewards)]
        n = len(rewards)
        number = 2 * next(counter) + seat
        return trained_sequence(
            [5] * n, [-1.0] * n, [0.0] * n, reward=sum(rewards), episode=number, seat=seat, turns=turns
        )

    counter = itertools.count()
    settings = TrainerSettings.load(rollout="environment", credit="turn", advantage="dr_grpo")
    sequences = [played(0, 0, 1), played(1, -1), played(0, 0, 1), played(1, -1)]
    [group] = Objective(settings).with_advantages([TrainingGroup([1], sequences)])
    assert [s.advantages.tolist() for s in group.sequences] == [[0, 0], [0], [0, 0], [0]]


def test_one_place_for_an_episode_is_enough_for_a_game(stage: Stage) -> None:
    group = stage.group(prompt_of(3), agent_concurrency=1)
    assert len(group.sequences) == 4


def test_a_seat_over_a_limit_has_lost_and_leaves_the_other_without_a_reward(stage: Stage) -> None:
    # The second call of the seat that moves second.
    stage.gateway.says = lambda messages: (
        429 if "I took" in messages[3]["content"] and len(messages) > 5 else optimal(messages)
    )
    prompt = prompt_of(next(seed for seed in range(200) if len(draw_heaps(seed)) == 3))
    group = stage.group(prompt, group_size=1, advantage="reinforce", over_limit_reward=-1)
    over, other = sorted(group.sequences, key=lambda e: e.reward is None)
    assert (over.reward, over.result.status, other.reward) == (-1.0, RewardStatus.OVER_LIMIT, None)
    assert group.episode_figures is not None
    assert [group.episode_figures[e.episode or 0].won for e in (over, other)] == [False, None]
    assert group.episodes_failed == {"opponent": 1, "limit": 1}
    assert group.failure_examples is not None
    assert group.failure_examples["limit"] == "HTTPStatusError: as the test says", "the gateway's reason"


def test_a_seat_that_waits_for_the_other_one_does_not_use_its_time(stage: Stage, waits_in_slow_motion: None) -> None:
    calls = itertools.count()

    def says(messages: list[dict[str, Any]]) -> str:
        # The other seat has asked nothing yet.
        time.sleep(1.5 if next(calls) == 0 else 0)
        return optimal(messages)

    stage.gateway.says = says
    group = stage.group(prompt_of(3), group_size=1, advantage="reinforce", agent_seconds=1.0)
    assert group.episodes_failed == {}
    assert sorted(group.rewards) == [-1.0, 1.0]


def test_a_reward_for_the_other_seats_action_belongs_to_the_answer_before_it() -> None:
    seat = Seat()
    seat.credit(0.5, has_acted=False)
    seat.credit(0.0, has_acted=True)
    seat.credit(0.25, has_acted=True)
    seat.credit(-1.0, has_acted=False)
    seat.refuse("pass", "no")
    assert seat.turn_rewards == [0.0, -0.75, 0.0]
    assert seat.episode_return == -0.25


@pytest.fixture
def opponent() -> Iterator[Callable[[Any], FakeService]]:
    """``opponent(says)``: an OpenAI endpoint whose model answers a conversation with ``says`` of it."""
    with ExitStack() as stack:

        def serve(says: Callable[[Messages], str | int]) -> FakeService:
            def complete(body: dict[str, Any]) -> Any:
                text = says(body["messages"])
                return text if isinstance(text, int) else {"choices": [{"message": {"content": text}}]}

            models = {"data": [{"id": "fixed"}, {"id": "other"}]}
            routes = {"GET /v1/models": lambda _: models, "POST /v1/chat/completions": complete}
            return stack.enter_context(fake_service(routes))

        yield serve


def against(stage: Stage, opponent: FakeService, **fields: Any) -> dict[str, Any]:
    """Let the stage's makers play against an opponent, and return the settings that do."""
    settings = {"opponent": f"{opponent.endpoint.url}/v1", "rollout": "environment", **fields}
    stage.opponent = FixedModel(TrainerSettings.load(**settings))
    return settings


@pytest.mark.parametrize("trained", [0, 1])
def test_a_fixed_opponent_plays_the_other_seat_and_one_seat_is_trained(
    stage: Stage, opponent: Any, trained: int
) -> None:
    seed = seed_won_by(trained, parity=trained)
    fixed = opponent(optimal)
    settings = against(stage, fixed, temperature=0.7, max_new_tokens=5)
    group = stage.group(prompt_of(seed), **settings)
    assert [(e.seat, e.reward) for e in group.sequences] == [(trained, 1.0)] * 2
    assert len(stage.gateway.sessions) == 2
    asked = fixed.asked("POST /v1/chat/completions")
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in asked} == {("fixed", 0.7, 5)}
    assert len(fixed.asked("GET /v1/models")) == 1
    for body in asked:
        assert heaps_of(body["messages"])
        assert ("I took" in body["messages"][3]["content"]) == (trained == 0)


def test_an_opponent_that_is_lost_ends_the_run_as_recoverable(stage: Stage, opponent: Any) -> None:
    settings = against(stage, opponent(lambda _: 500))
    maker = stage.maker(**settings)
    assert stage.thread.call(maker.make_group(prompt_of(1))) is None
    assert isinstance(maker.all_failed(), DependencyLostError)
    assert "opponent failed" in str(maker.last_failure)


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(401, ConfigurationError, "asks for no key"), (503, DependencyLostError, "/v1/models")],
)
def test_a_run_does_not_begin_without_its_opponent(
    stage: Stage, opponent: Any, status: int, error: type[Exception], says: str
) -> None:
    fixed = opponent(optimal)
    fixed.routes["GET /v1/models"] = lambda _: status
    against(stage, fixed)
    assert stage.opponent is not None
    with pytest.raises(error, match=says):
        stage.thread.call(stage.opponent.wait_healthy(IDLE_SECONDS if status == 401 else 0.5))


@pytest.mark.parametrize("stage", ["guessing"], indirect=True)
def test_an_opponent_in_an_environment_of_one_seat_is_refused(stage: Stage, opponent: Any) -> None:
    settings = against(stage, opponent(optimal))
    with pytest.raises(ConfigurationError, match="one seat"):
        stage.group(prompt_of(1), **settings)
