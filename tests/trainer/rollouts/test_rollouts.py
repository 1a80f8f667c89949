"""Groups of a step, of a collector and of an evaluation, made by services that answer as each test says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import structlog
import torch
from prometheus_client import REGISTRY

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient
from services.core.endpoints import ENDPOINTS_VARIABLE, ROUTER_PORT
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import ServiceThread
from services.http.client import RequestRefusedError
from services.protocol.prompts import Cursor
from services.protocol.rewards import RewardStatus
from services.run_page.directory import FIRST_FAILURE
from services.run_page.progress import Activity
from tests.fake_service import FakeService, Route, fake_service
from tests.waiting import IDLE_SECONDS
from trainer.checkpoints.state import Fingerprint, RunState, describe_accuracy
from trainer.collector import Collector, collector_name
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.loop import TrainingLoop
from trainer.model.learner import UpdateResult
from trainer.reporting.metrics import export
from trainer.reporting.status import RunStatus
from trainer.rollouts import batch, clients
from trainer.rollouts.batch import Batch
from trainer.rollouts.clients import Clients
from trainer.rollouts.evaluate import KEPT_SAMPLES, Evaluator
from trainer.rollouts.groups import LEAST_FAILURES, Completions, GroupMaker
from trainer.rollouts.service_calls import ServiceCalls

VOCAB_SIZE = 1000
QUEUE: dict[str, Any] = {"mode": "async", "collector_in_process": False}
"""Settings of a trainer that gets its groups from the queue."""
BAD = 7
"""The prompt, by its place, that goes wrong in these tests."""


def prompts(request: dict[str, Any]) -> dict[str, Any]:
    """POST /prompts: one epoch of 100, whose token id is 1 more than their place."""
    cursor, epoch = request["cursor"], request["cursor"].get("epoch", 0)
    first, last = cursor["position"], min(cursor["position"] + request["batch_size"], 100)
    found = [
        {"id": f"p/{i}", "prompt": str(i), "ground_truth": "x", "prompt_ids": [i + 1], "epoch": epoch, "position": i}
        for i in range(first, last)
    ]
    return {"prompts": found, "cursor": {**cursor, "position": last}, "total_available": 100}


def completions(request: dict[str, Any]) -> list[dict[str, Any]]:
    """POST /generate: as many as are asked for."""
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-0.5, 3, None]]}
    return [{"text": "x", "output_ids": [3], "meta_info": meta}] * request["sampling_params"]["n"]


def fails_for(*places: int, status: int) -> Route:
    """POST /generate that answers some prompts with a status."""
    ids = [[place + 1] for place in places]
    return lambda request: status if request["input_ids"] in ids else completions(request)


def alternate_rewards(request: dict[str, Any]) -> dict[str, Any]:
    """POST /batch_reward: every other answer is right."""
    return {"rewards": [{"reward": float(i % 2)} for i, _ in enumerate(request["items"])]}


def added(request: dict[str, Any]) -> dict[str, Any]:
    return {"added": len(request["groups"]), "duplicates": 0, "size": 0}


class Steps:
    """A training loop whose learner learns nothing: its steps only fetch, generate, score and store."""

    def __init__(self, main: ServiceCalls) -> None:
        self.main = main
        self.batch = Batch(Objective(main.settings))
        rank_calls = MagicMock()
        rank_calls.ranks = MagicMock(world_size=1, n_shares=1, device=torch.device("cpu"), **{"mesh.ndim": 1})
        rank_calls.update.return_value = UpdateResult()
        rank_calls.on_all_ranks = lambda method: method
        rank_calls.learner.mean_entropy.return_value = 1.5
        self.rank_calls = rank_calls
        self.files = MagicMock()
        fingerprint = Fingerprint(model="test", weights="1a", tokenizer="2b", dataset="test", data={})
        state = RunState(model_type="test", parameters=0, policy_version=1, fingerprint=fingerprint)
        self.loop = TrainingLoop(main.settings, main, rank_calls, self.files, RunStatus(), state, 100, 400)
        self.loop.publisher = MagicMock(**{"publish.return_value": {}, "prover.difference": 0.0})

    def next(self) -> list[int]:
        """Take a step; return the positions of the prompts whose groups were trained on."""
        if not self.loop.step():
            return []
        _, groups, _ = self.files.record_samples.call_args.args
        return [group.prompt.position for group in groups]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last step."""
        recorded: dict[str, float] = self.files.record_step.call_args.args[1]
        return recorded


@dataclass
class Services:
    """The fakes, and the clients of the trainer that speak to them."""

    data: FakeService
    rollouts: FakeService
    rewards: FakeService
    replay: FakeService
    clients: Clients
    thread: ServiceThread
    directory: Path

    def settings(self, **fields: Any) -> TrainerSettings:
        wanted = {"batch_size": 4, "group_size": 2, "num_epochs": 1, "replay_groups": 0, "eval_prompts": 0}
        return TrainerSettings.load(**(wanted | {"checkpoint_every": 0, "shared_dir": self.directory} | fields))

    def sampler(self, settings: TrainerSettings) -> Completions:
        return Completions(settings, self.clients.rollouts, self.clients.rewards)

    def main(self, settings: TrainerSettings) -> ServiceCalls:
        return ServiceCalls(settings, self.thread, replace(self.clients, samplers={"": self.sampler(settings)}))

    def steps(self, position: int = 0, **fields: Any) -> Steps:
        main = self.main(self.settings(**fields))
        main.cursors = {"": Cursor(position=position)}
        return Steps(main)

    def collect(self, **fields: Any) -> None:
        settings = self.settings(mode="async", **fields)
        maker = GroupMaker(settings, self.sampler(settings))
        self.thread.call(Collector(settings, self.clients, maker).run())

    def evaluate(self, **fields: Any) -> tuple[dict[str, float], Evaluator]:
        settings = self.settings(**fields)
        evaluator = Evaluator(settings, self.clients.data, {"": self.sampler(settings)}, Activity())
        return self.thread.call(evaluator.evaluate()), evaluator


@pytest.fixture
def fakes() -> Iterator[list[FakeService]]:
    routes: list[dict[str, Route]] = [
        {"POST /prompts": prompts, "GET /stats": lambda _: stats()},
        {"POST /generate": completions},
        {"POST /batch_reward": alternate_rewards, "GET /stats": lambda _: {}},
        {"POST /groups": added, "POST /queue": added, "POST /queue/acknowledge": acknowledged},
    ]
    with ExitStack() as stack:
        yield [stack.enter_context(fake_service(own)) for own in routes]


@pytest.fixture
def services(fakes: list[FakeService], tmp_path: Path) -> Iterator[Services]:
    data, rollouts, rewards, buffer = (fake.endpoint for fake in fakes)
    scoring = RewardClient(rewards, deadline=20)
    generating = RolloutClient(rollouts, vocab_size=VOCAB_SIZE, deadline_seconds=20, max_concurrency=8)
    sampler = Completions(TrainerSettings.load(), generating, scoring)
    clients = Clients(
        DataClient(data, deadline=20), scoring, ReplayClient(buffer, deadline=20), generating, {"": sampler}
    )
    with ServiceThread() as thread:
        thread.call(clients.open())
        yield Services(*fakes, clients, thread, tmp_path)
        thread.call(clients.close())


def stats(curriculum: str = "off", **epochs: int) -> dict[str, Any]:
    """GET /stats of the data-server; ``epochs`` says where consumers stand."""
    cursors = {f"{name}/train".replace("_", "-"): {"epoch": epoch, "position": 0} for name, epoch in epochs.items()}
    counts = {"source": "test", "train_prompts": 100, "test_prompts": 0, "refused": {}}
    return {**counts, "cursors": cursors, "curriculum": curriculum}


def failed_prompts() -> float:
    return REGISTRY.get_sample_value("trainer_prompts_failed_total") or 0.0


def test_a_prompt_has_other_seeds_in_each_epoch(services: Services) -> None:
    steps = services.steps(num_epochs=2)
    assert steps.next() == [0, 1, 2, 3]
    steps.main.cursors = {"": Cursor(epoch=1)}
    assert steps.next() == [0, 1, 2, 3]
    sent = services.rollouts.asked("POST /generate")
    assert len({request["sampling_params"]["sampling_seed"] for request in sent}) == len(sent) == 8


# Where the run is in its data


def equal_rewards_for(*places: int) -> Route:
    """POST /batch_reward by which the answers to some prompts are all right, and of those to others every second."""
    texts = [str(place) for place in places]
    return lambda request: {
        "rewards": [{"reward": float(i % 2 or item["prompt"] in texts)} for i, item in enumerate(request["items"])]
    }


def test_the_learning_rate_decays_with_the_data_where_they_are_used_up_sooner_than_the_steps(
    services: Services,
) -> None:
    services.rewards.routes["POST /batch_reward"] = equal_rewards_for(0, 2, BAD)
    services.rollouts.routes["POST /generate"] = fails_for(BAD + 1, status=400)
    steps = services.steps(dynamic_sampling_tries=1)
    assert steps.next() == [1, 3, 4, 5]
    assert steps.next() == [6, 9, 10, 11]
    steps.next()
    # A hundred steps, four hundred prompts; each of the first two steps used six prompts.
    assert [call.args[1:] for call in steps.rank_calls.update.call_args_list] == [(0, 0), (1, 6 / 4), (2, 12 / 4)]
    assert steps.loop.state.prompts_used == 16


def test_groups_of_the_queue_that_are_stale_or_without_a_signal_count_as_data_used(services: Services) -> None:
    lease, dropped = leases(*([position] for position in range(12))), iter([3, 1])
    services.replay.routes["POST /queue/lease"] = lambda request: lease(request) | {"dropped_stale": next(dropped, 0)}
    steps = services.steps(**QUEUE, dynamic_sampling_tries=1)
    assert steps.next() == [4, 5, 6, 7], "the first four have no signal, and only so many are replaced"
    assert steps.loop.state.prompts_used == 12
    services.replay.routes["POST /queue/lease"] = leases(*([position] for position in range(12, 24)))
    steps.next()
    assert steps.rank_calls.update.call_args.args[1:] == (1, 3)


def test_every_tenth_step_has_the_entropy_over_all_groups_made(services: Services) -> None:
    """In both modes; that of the update leaves groups out."""
    services.rewards.routes["POST /batch_reward"] = equal_rewards_for(0)
    steps = services.steps(dynamic_sampling_tries=1)
    found = []
    for _ in range(11):
        steps.next()
        found.append(steps.metrics.get("entropy_all"))
    assert found == [1.5, *[None] * 9, 1.5]
    first, _ = (call.args[0] for call in steps.rank_calls.learner.mean_entropy.call_args_list)
    assert [group.group_id.rsplit("-", 1)[1] for group in first] == ["0", "1", "2", "3", "4"]
    services.replay.routes["POST /queue/lease"] = leases(*([position] for position in range(8)))
    steps = services.steps(**QUEUE, dynamic_sampling_tries=1)
    assert steps.next() == [4, 5, 6, 7]
    assert [group.group_id for group in steps.rank_calls.learner.mean_entropy.call_args.args[0]] == [
        f"g{i}" for i in range(8)
    ]


# How old groups may be


@pytest.mark.parametrize(("version", "oldest"), [(7, {"fresh": 5, "replayed": 4}), (1, {"fresh": 0, "replayed": 0})])
def test_groups_are_at_most_as_stale_as_the_settings_say(
    services: Services, version: int, oldest: dict[str, int]
) -> None:
    services.replay.routes |= {
        "POST /queue/lease": leases([1, 2, 3, 4]),
        "POST /groups/sample": lambda _: {"groups": []},
        "POST /groups/priorities": lambda _: {"updated": 0, "unknown": 0},
    }
    steps = services.steps(**QUEUE, max_staleness=2, replay_groups=2, replay_max_staleness=3)
    steps.loop.state.policy_version = version
    steps.next()
    [fresh] = services.replay.asked("POST /queue/lease")
    [replayed] = services.replay.asked("POST /groups/sample")
    found = {"fresh": fresh["min_policy_version"], "replayed": replayed["min_policy_version"]}
    assert found == oldest


# What the run waits for


def test_the_activity_says_how_many_workers_answer_why_not_more_and_until_when_the_trainer_waits(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    main = ServiceCalls(
        services.settings(min_workers=2, service_deadline_seconds=60, engine_start_seconds=60),
        services.thread,
        services.clients,
    )

    def health(_: dict[str, Any]) -> Any:
        seen.append(main.activity.shown())
        return (503, {"detail": "starting"}) if len(seen) == 1 else {}

    def workers(_: dict[str, Any]) -> dict[str, Any]:
        seen.append(main.activity.shown())
        count = min(len(seen) // 2 - 1, 2)
        return {"workers": [{"id": f"{n}", "url": f"http://w{n}", "is_healthy": True} for n in range(count)]}

    with fake_service({"GET /health": health, "GET /workers": workers}) as router:
        address = f"{router.endpoint.host}:{router.endpoint.port}"
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({f"rollout-server-0:{ROUTER_PORT}": address}))
        main.wait_for_workers(lambda: None)
    assert {told["what"] for told in seen} == {"waiting for 2 rollout workers"}
    assert [told["done"].partition(" (")[0] for told in seen] == [f"{count} there" for count in (0, 0, 0, 0, 0, 1, 1)]
    assert ["no router yet" in told["done"] for told in seen] == [True, True, *[False] * 5]
    assert "503 starting" in seen[1]["done"]
    assert seen[0]["until"] == pytest.approx(seen[0]["since"] + main.settings.start_deadline_seconds)


# Dynamic sampling


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_reward_of_a_step_is_of_all_completions_that_it_made(services: Services, mode: str) -> None:
    """The first six of ten prompts are always answered right; four groups have rewards that differ."""
    services.rewards.routes["POST /batch_reward"] = equal_rewards_for(*range(6))
    fields: dict[str, Any] = {"dynamic_sampling_tries": 3, "batch_size": 4}
    if mode == "async":
        queue = [fresh(n) for n in range(10)]
        for number, group in enumerate(queue):
            [right] = group["sequences"]
            group["sequences"] = [right | {"result": {"reward": float(number < 6)}}, right]
        services.replay.routes["POST /queue/lease"] = lambda _: {
            "lease_id": "l",
            "groups": [queue.pop(0)],
            "dropped_stale": 0,
        }
        fields |= QUEUE
    steps = services.steps(**fields)
    assert steps.next() == [6, 7, 8, 9]
    metrics = steps.metrics
    assert (metrics["groups"], metrics["groups_resampled"], metrics["completions"]) == (4, 6, 20)
    assert (metrics["reward_mean"], metrics["reward_trained_mean"]) == (0.8, 0.5)
    assert steps.loop.state.rewards == [0.8], "of which the summary is made"
    assert len(steps.files.record_step.call_args.args[2]) == 10


# A prompt that cannot be generated


def test_a_prompt_that_cannot_be_generated_is_left_out_of_the_step(services: Services) -> None:
    services.rollouts.routes["POST /generate"] = fails_for(BAD, status=500)
    before = failed_prompts()
    steps = services.steps(position=BAD - 1)
    assert steps.next() == [BAD - 1, BAD + 1, BAD + 2]
    assert steps.loop.state.cursors[""].position == BAD + 3, "it is not taken again"
    assert failed_prompts() == before + 1


@pytest.mark.parametrize(
    ("status", "error", "batch_size"),
    [(500, DependencyLostError, 4), (400, ConfigurationError, 1), (400, ConfigurationError, 10)],
)
def test_prompts_of_which_none_can_be_generated_end_the_run_and_say_why(
    services: Services, status: int, error: type[Exception], batch_size: int
) -> None:
    services.rollouts.routes["POST /generate"] = lambda _: status
    said = rf"none of {max(batch_size, LEAST_FAILURES)} prompts got a completion .*as the test says"
    with pytest.raises(error, match=said):
        services.steps(batch_size=batch_size).next()


FAILED = {"reward": None, "status": "error", "reason": "mine:score: KeyError: 'x' (mine.py, line 3, in score)"}


def rewards(*, fails: Callable[[dict[str, Any]], bool], result: dict[str, Any] = FAILED) -> Route:
    """POST /batch_reward with ``result`` for the items at which it ``fails``."""
    return lambda request: {
        "rewards": [result if fails(item) else {"reward": float(i % 2)} for i, item in enumerate(request["items"])]
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("tries", [0, 1])
def test_a_reward_function_that_fails_at_every_answer_ends_the_run_after_two_batches(
    services: Services, tries: int, mode: str
) -> None:
    """Collectors push groups without a reward, too, and the trainer, which has them all, ends the run."""
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda _: True)
    batches = [[i] for i in range(8)] if tries else [[0, 1, 2, 3], [4, 5, 6, 7]]
    services.replay.routes["POST /queue/lease"] = leases(*batches, **FAILED)
    steps = services.steps(**(QUEUE if mode == "async" else {}), dynamic_sampling_tries=tries)
    steps.main.settings.run_dir.mkdir(parents=True)
    said = r"the reward function failed at every answer of 8 prompts in a row: mine:score: KeyError: 'x' \(mine.py, li"
    if not tries:
        assert steps.next() == [0, 1, 2, 3]
        if mode == "sync":
            failure = steps.main.settings.run_dir / FIRST_FAILURE
            assert failure.read_text() == f"reward_error: {FAILED['reason']}\n"
    with pytest.raises(ConfigurationError, match=said):
        steps.next()


@pytest.mark.parametrize("status", ["timeout", "over_limit", "overloaded"])
def test_answers_over_a_limit_and_answers_of_an_overloaded_server_do_not_end_the_run(
    services: Services, status: str
) -> None:
    result = {"reward": None, "status": status, "reason": "more than 2 s"}
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda _: True, result=result)
    steps = services.steps()
    for first in range(0, 12, 4):
        assert steps.next() == list(range(first, first + 4))


def test_one_answer_that_can_be_scored_begins_the_count_anew(services: Services) -> None:
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda item: int(item["prompt"]) % 4 != 3)
    steps = services.steps()
    for first in range(0, 16, 4):
        assert steps.next() == list(range(first, first + 4))


@pytest.mark.parametrize("status", [400, 500])
def test_an_evaluation_leaves_out_what_cannot_be_generated(services: Services, status: int) -> None:
    services.rollouts.routes["POST /generate"] = fails_for(BAD, status=status)
    services.rewards.routes["POST /batch_reward"] = lambda request: {
        "rewards": [{"reward": 1.0}] * len(request["items"])
    }
    metrics, evaluator = services.evaluate(eval_prompts=10, eval_samples=2)
    assert (metrics["eval_prompts"], metrics["eval_left_out"], metrics["accuracy"]) == (10, 1, 1)
    # Of the first prompts the greedy completions are kept to be shown, not the samples.
    kept = [sample["prompt"] for sample in evaluator.samples]
    assert len(kept) == len(set(kept)) == KEPT_SAMPLES - (BAD < KEPT_SAMPLES)
    assert all(sample["completion"] and sample["reward"] == 1 for sample in evaluator.samples)
    services.rollouts.routes["POST /generate"] = lambda _: status
    with pytest.raises((DependencyLostError, ConfigurationError), match="none of 10 prompts"):
        services.evaluate(eval_prompts=10)


def test_an_evaluation_samples_at_the_temperature_of_the_run_beside_its_greedy_answers(services: Services) -> None:
    services.evaluate(eval_prompts=2, eval_samples=3, temperature=0.7)
    sent = [request["sampling_params"] for request in services.rollouts.asked("POST /generate")]
    assert sorted((params["temperature"], params["n"]) for params in sent) == [(0.0, 1)] * 2 + [(0.7, 3)] * 2


def test_an_evaluation_of_few_prompts_that_the_engine_refuses_has_no_accuracy_and_ends_no_run(
    services: Services,
) -> None:
    services.rollouts.routes["POST /generate"] = lambda _: 400
    metrics, evaluator = services.evaluate(eval_prompts=LEAST_FAILURES - 1, eval_samples=2)
    assert (metrics["eval_prompts"], metrics["eval_left_out"]) == (7, 7)
    assert "accuracy" not in metrics
    assert "as the test says" in str(evaluator.failure)
    services.rollouts.routes["POST /generate"] = lambda _: 500
    with pytest.raises(DependencyLostError, match="none of 1 prompt got a completion"):
        services.evaluate(eval_prompts=1)


def test_an_evaluation_whose_every_answer_the_reward_function_fails_at_says_why_it_has_no_accuracy(
    services: Services,
) -> None:
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda _: True)
    _, evaluator = services.evaluate(eval_prompts=20)
    assert evaluator.failure == FAILED["reason"]
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda item: item["prompt"] != "0")
    assert services.evaluate(eval_prompts=20)[1].failure is None


@pytest.mark.parametrize("at_step", [1, 2])
def test_an_evaluation_that_fails_ends_the_run_unless_it_is_the_last(services: Services, at_step: int) -> None:
    steps = services.steps(eval_every=1, eval_prompts=20)
    steps.loop.total_steps = 2
    for _ in range(at_step - 1):
        assert steps.next()
    # The prompts of the training come first.
    services.rollouts.routes["POST /generate"] = lambda request: (
        400 if request["sampling_params"]["temperature"] == 0 else completions(request)
    )
    if at_step == 1:
        with pytest.raises(ConfigurationError, match="none of 20 prompts"):
            steps.next()
        return
    assert steps.next() == [4, 5, 6, 7]
    state = steps.loop.state
    assert (state.step, state.evaluated_step, state.last_accuracy) == (2, 2, None)
    assert "none of 20 prompts got a completion" in str(state.evaluation_error)


@pytest.mark.parametrize(("asked", "lines"), [(4, 1), (0, 0)])
def test_fewer_held_out_prompts_than_asked_for_are_said_once(services: Services, asked: int, lines: int) -> None:
    services.data.routes["GET /stats"] = lambda _: stats() | {"test_prompts": 1}
    with structlog.testing.capture_logs() as logged:
        services.main(services.settings(eval_prompts=asked)).describe_data()
    said = "EVAL_PROMPTS is 4, but the data hold out 1 (DATASET_HELD_OUT)"
    assert [entry["event"] for entry in logged if entry["log_level"] == "warning"] == [said] * lines


def test_an_evaluation_counts_answers_over_a_limit_as_wrong_and_leaves_out_what_a_service_failed_at(
    services: Services,
) -> None:
    without_reward = {"2": "over_limit", "3": "over_limit", "4": "error", "5": "overloaded"}

    def score(item: dict[str, Any]) -> dict[str, Any]:
        status = without_reward.get(item["prompt"])
        # Of the others the answers to even prompts are right.
        return {"reward": None, "status": status} if status else {"reward": float(int(item["prompt"]) % 2 == 0)}

    services.rewards.routes["POST /batch_reward"] = lambda request: {"rewards": [*map(score, request["items"])]}
    metrics, _ = services.evaluate(eval_prompts=12, eval_samples=2)
    assert (metrics["eval_prompts"], metrics["eval_over_limit"], metrics["eval_left_out"]) == (12, 2, 2)
    # Right: 0, 6, 8, 10. Wrong: 1, 7, 9, 11 and the two over a limit.
    assert metrics["accuracy"] == metrics["avg_at_2"] == metrics["pass_at_2"] == 0.4
    assert metrics["eval_reward"] == 0.4, "answers over a limit have the reward of training"
    # The two samples of a prompt agree here, so that they say no more than one.
    for name in ("accuracy", "avg_at_2", "pass_at_2"):
        assert metrics[f"{name}_stderr"] == pytest.approx(math.sqrt(0.4 * 0.6 / 10))
        assert (metrics[f"{name}_low"], metrics[f"{name}_high"]) == pytest.approx((0.168, 0.687), abs=5e-4)
    said = "greedy pass@1 of 0.400 (0.168 to 0.687) on 10 held-out prompts"
    assert describe_accuracy(metrics) == said


@pytest.mark.parametrize("status", [status.value for status in RewardStatus if status is not RewardStatus.SCORED])
def test_training_and_evaluation_agree_on_whether_an_answer_is_wrong_or_not_judged(
    services: Services, status: str
) -> None:
    result = {"reward": None, "status": status, "reason": "said"}
    # The first two of four, which fail again when they are asked for again.
    services.rewards.routes["POST /batch_reward"] = lambda request: {
        "rewards": [result if i < 2 else {"reward": float(i)} for i, _ in enumerate(request["items"])]
    }
    steps = services.steps(group_size=4, batch_size=1)
    assert steps.next() == [0]
    _, metrics, [made], _ = steps.files.record_step.call_args.args
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda _: True, result=result)
    evaluated, _ = services.evaluate(eval_prompts=3)
    is_wrong = status == "over_limit"
    assert [e.reward for e in made.sequences] == [*([0.0, 0.0] if is_wrong else [None, None]), 2.0, 3.0]
    assert (metrics["over_limit"], metrics["unscorable"]) == ((2, 0) if is_wrong else (0, 2))
    assert metrics["reward_mean"] == (1.25 if is_wrong else 2.5)
    assert evaluated.get("accuracy") == (0.0 if is_wrong else None)
    assert (evaluated["eval_over_limit"], evaluated["eval_left_out"]) == ((3, 0) if is_wrong else (0, 3))


def test_an_answer_over_a_limit_is_not_scored_again(services: Services) -> None:
    result = {"reward": None, "status": "over_limit", "reason": "said"}
    services.rewards.routes["POST /batch_reward"] = rewards(fails=lambda _: True, result=result)
    services.steps(batch_size=1).next()
    assert len(services.rewards.asked("POST /batch_reward")) == 1
    result["status"] = "timeout"
    services.steps(batch_size=1).next()
    assert len(services.rewards.asked("POST /batch_reward")) == 3


class CollectorServices:
    """What the data-server and the replay-buffer answer a collector: ``count`` prompts, and room for all."""

    def __init__(self, services: Services, count: int) -> None:
        self.position = 0
        self.count = count
        self.cursors: list[tuple[str, int]] = []
        services.data.routes["GET /prompts"] = self.prompts
        services.data.routes["PUT /cursor"] = self.set_cursor
        services.replay.routes["POST /queue/admission"] = lambda request: {"places": request["most"]}
        self.queue = lambda: [g for r in services.replay.asked("POST /queue") for g in r.get("groups", ())]

    def prompts(self, request: dict[str, Any]) -> dict[str, Any]:
        start, self.position = self.position, self.position + int(request["batch_size"])
        reply = prompts({"cursor": {"position": start}, "batch_size": int(request["batch_size"])})
        for prompt in reply["prompts"]:
            prompt["epoch"] = int(prompt["position"] >= self.count)
        return reply

    def set_cursor(self, request: dict[str, Any]) -> dict[str, Any]:
        self.cursors.append((request["consumer"], request["cursor"]["epoch"]))
        return dict(request["cursor"])


@pytest.mark.parametrize(
    ("status", "error"), [(500, DependencyLostError), (400, ConfigurationError)], ids=["lost", "refused"]
)
def test_a_collector_ends_when_a_batch_in_a_row_cannot_be_generated(
    services: Services, status: int, error: type[Exception]
) -> None:
    served = CollectorServices(services, 50)
    services.rollouts.routes["POST /generate"] = lambda _: status
    with pytest.raises(error, match="as the test says"):
        services.collect()
    assert served.position < 50
    assert (collector_name(0), 1) not in served.cursors, "it is not done"


def test_a_restarted_collector_begins_with_the_prompts_that_the_last_one_left(services: Services) -> None:
    served = CollectorServices(services, 12)
    accepted: set[int] = set()

    def until_bad(request: dict[str, Any]) -> Any:
        # A request that is cancelled half-way has no body.
        position = request["groups"][0]["prompt"]["position"] if request else BAD
        accepted.add(position)
        return 400 if position == BAD else added(request)

    services.replay.routes["POST /queue"] = until_bad
    with pytest.raises(RequestRefusedError, match="400 as the test says"):
        services.collect()
    services.replay.requests.clear()
    services.replay.routes["POST /queue"] = added
    services.collect()
    assert {group["prompt"]["position"] for group in served.queue()} >= set(range(12)) - accepted | {BAD}


def test_prompts_whose_reply_was_lost_with_the_collector_are_asked_for_again(services: Services) -> None:
    served = CollectorServices(services, 12)
    answer, ids = served.prompts, list[str]()

    def lost(request: dict[str, Any]) -> Any:
        ids.append(request["request_id"])
        answer(request)
        return 400

    services.data.routes["GET /prompts"] = lost
    with pytest.raises(RequestRefusedError, match="400 as the test says"):
        services.collect()
    served.position = 0  # The data-server gives a repeated request the same prompts.
    services.data.routes["GET /prompts"] = answer
    services.collect()
    assert [request["request_id"] for request in services.data.asked("GET /prompts")][: len(ids) + 1] == [*ids, ids[-1]]
    assert sorted(group["prompt"]["position"] for group in served.queue()) == list(range(12))


# The fresh queue


def fresh(position: int, **result: Any) -> dict[str, Any]:
    """A group as the replay-buffer leases it."""
    experience = {
        "completion": "x",
        "completion_ids": [3],
        "logprobs": [-0.5],
        "policy_versions": [1],
        "finish_reason": "stop",
        "result": result or {"reward": 1.0},
    }
    prompt = {"id": f"p/{position}", "prompt": "?", "ground_truth": "x", "prompt_ids": [1], "position": position}
    return {"group_id": f"g{position}", "prompt": prompt, "sequences": [experience]}


def acknowledged(_: dict[str, Any]) -> dict[str, Any]:
    """POST /queue/acknowledge."""
    return {"acknowledged": 2, "lost": 0}


def leases(*replies: list[int], **result: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """POST /queue/lease that gives these groups in turn, and then none."""
    left = list(enumerate(replies))

    def lease(request: dict[str, Any]) -> dict[str, Any]:
        number, groups = left.pop(0) if left else (0, [])
        if not groups:
            time.sleep(min(request["wait_seconds"], 0.02))
        return {
            "lease_id": f"l{number}" if groups else None,
            "groups": [fresh(i, **result) for i in groups],
            "dropped_stale": 0,
        }

    return lease


def test_a_group_that_is_leased_again_is_in_the_batch_once(services: Services) -> None:
    # The first lease ran out while the batch waited for more.
    services.replay.routes["POST /queue/lease"] = leases([1, 2], [1, 2], [3, 4])
    assert services.steps(**QUEUE).next() == [1, 2, 3, 4]
    leases_told = [request["lease_id"] for request in services.replay.asked("POST /queue/acknowledge")]
    assert leases_told == ["l0", "l1", "l2"], "every lease, so that none of its groups comes again"


class LeaseClock:
    """A clock on which each lease takes 1500 s."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def watch(self, route: Route) -> Route:
        def lease(request: dict[str, Any]) -> Any:
            self.now += 1500
            return route(request)

        return lease


@pytest.mark.parametrize(
    ("max_new_tokens", "given", "seconds"),
    [
        (32_768, [[1], [], [2], [], [3, 4]], None),
        (512, [[1], [], [2], [], [3, 4]], "900"),
        # A group that is leased again and again does not renew the wait.
        (16_384, [[1], [1], [], [2, 3, 4]], "1938.4"),
    ],
)
def test_a_batch_waits_for_each_further_group_as_long_as_an_answer_may_take(
    services: Services,
    monkeypatch: pytest.MonkeyPatch,
    max_new_tokens: int,
    given: list[list[int]],
    seconds: str | None,
) -> None:
    clock = LeaseClock()
    monkeypatch.setattr(batch, "time", clock)
    services.replay.routes["POST /queue/lease"] = clock.watch(leases(*given))
    services.data.routes["GET /cursor"] = lambda _: {"epoch": 0, "position": 4}
    steps = services.steps(**QUEUE, max_new_tokens=max_new_tokens)
    if seconds is None:
        assert steps.next() == [1, 2, 3, 4]
    else:
        with pytest.raises(DependencyLostError, match=f"gave 1 of 4 groups, none of them in the last {seconds} s"):
            steps.next()


def test_the_last_batch_comes_at_once_when_every_collector_is_done(services: Services) -> None:
    # One of the last four could not be generated.
    services.data.routes["GET /stats"] = lambda _: stats(collectors=1, collector_0=1, collector_1=1)
    services.replay.routes["POST /queue/lease"] = leases([1, 2], [3])
    assert services.steps(mode="async").next() == [1, 2, 3]


@pytest.mark.parametrize(
    "stand",
    [
        {"collectors": 1, "collector_0": 1, "collector_1": 0},
        {"collectors": 0, "collector_0": 1, "collector_1": 1},
        {"collectors": 0},
        {},
    ],
    ids=str,
)
def test_a_short_batch_waits_as_long_as_a_collector_is_at_work(services: Services, stand: dict[str, int]) -> None:
    services.data.routes["GET /stats"] = lambda _: stats(**stand)
    services.replay.routes["POST /queue/lease"] = leases([1, 2], [], [], [3, 4])
    assert len(services.steps(mode="async").next()) == 4
    assert all(request["wait_seconds"] > 0 for request in services.replay.asked("POST /queue/lease"))


def test_a_collector_says_when_it_begins_and_when_all_is_pushed(services: Services) -> None:
    served = CollectorServices(services, 8)
    services.collect()
    assert served.cursors == [(collector_name(0), 0), (collector_name(0), 1)]
    assert len(served.queue()) == 8
    order = [name for name, _ in services.data.requests]
    assert (order[0], order[-1]) == ("PUT /cursor", "PUT /cursor")


# Success rates


def rates_of(services: Services) -> list[dict[str, float]]:
    return [request["success_rates"] for request in services.data.asked("POST /success_rates")]


@pytest.fixture
def curriculum_on(services: Services) -> None:
    services.data.routes["GET /stats"] = lambda _: stats("balanced")
    services.data.routes["POST /success_rates"] = lambda request: {
        "recorded": len(request["success_rates"]),
        "unknown": 0,
    }


@pytest.mark.usefixtures("curriculum_on")
def test_a_step_tells_the_curriculum_what_it_scored(services: Services) -> None:
    # The first prompt's are all right, so that it is replaced: of the curriculum it is part all the same.
    services.rewards.routes["POST /batch_reward"] = equal_rewards_for(0)
    steps = services.steps(dynamic_sampling_tries=1)
    steps.next()
    steps.next()
    assert rates_of(services) == [
        {"p/0": 1.0, "p/1": 0.5, "p/2": 0.5, "p/3": 0.5, "p/4": 0.5},
        {f"p/{i}": 0.5 for i in range(5, 9)},
    ]
    assert len(services.data.asked("GET /stats")) == 1


@pytest.mark.usefixtures("curriculum_on")
@pytest.mark.parametrize(
    ("part", "decided_by", "right"),
    [({"f:check": 0.0}, "f:check", 0.0), ({"f:check": 1.0}, "f:check", 1.0), ({"judge": 40.0}, "", None)],
)
def test_curriculum_and_accuracy_follow_the_component_that_decides(
    services: Services, part: dict[str, float], decided_by: str, right: float | None
) -> None:
    result = {"components": part | {"f:percent": 40.0}, "decided_by": decided_by}
    services.rewards.routes["POST /batch_reward"] = lambda request: {
        "rewards": [{"reward": 40.0 + n, **result} for n, _ in enumerate(request["items"])]
    }
    services.steps(dynamic_sampling_tries=1).next()
    assert {rate for rates in rates_of(services) for rate in rates.values()} == {right} - {None}
    metrics, evaluator = services.evaluate(eval_prompts=4, eval_samples=2)
    assert (metrics.get("accuracy"), metrics.get("avg_at_2"), metrics.get("pass_at_2")) == (right,) * 3
    assert (metrics["eval_reward"], metrics["eval_left_out"]) == (40.0, 0)
    assert (evaluator.failure is None, "ACCURACY_FN" in str(evaluator.failure)) == (right is not None, right is None)


@pytest.mark.usefixtures("curriculum_on")
def test_a_collector_tells_the_curriculum_a_batch_at_a_time(services: Services) -> None:
    CollectorServices(services, 12)
    services.collect()
    sent = rates_of(services)
    assert [len(rates) for rates in sent] == [4, 4, 4]
    assert {name: rate for rates in sent for name, rate in rates.items()} == {f"p/{i}": 0.5 for i in range(12)}


@pytest.mark.usefixtures("curriculum_on")
@pytest.mark.parametrize("status", [422, 500, 503])
def test_rates_that_cannot_be_recorded_end_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    # Only where the request is repeated does the time pass.
    monkeypatch.setattr(clients, "RECORD_SECONDS", 5.0 if status == 503 else IDLE_SECONDS)
    services.data.routes["POST /success_rates"] = lambda _: status
    assert len(services.steps().next()) == 4
    assert rates_of(services)


def test_completions_are_scored_as_a_group_in_training_and_alone_in_an_evaluation(services: Services) -> None:
    services.steps(batch_size=2).next()
    assert [(r["is_group"], len(r["items"])) for r in services.rewards.asked("POST /batch_reward")] == [(True, 2)] * 2
    services.rewards.requests.clear()
    services.data.routes["POST /prompts"] = lambda request: prompts(request | {"batch_size": 1})
    services.evaluate(eval_prompts=1, eval_samples=2)
    assert [r.get("is_group") for r in services.rewards.asked("POST /batch_reward")] == [None, None]


def test_figures_of_the_judge_are_metrics_and_a_server_without_one_is_asked_once(services: Services) -> None:
    steps = services.steps()
    steps.next()
    steps.next()
    assert len(services.rewards.asked("GET /stats")) == 1
    figures = {"judge_calls": 3.0, "judge_failures_timeout": 1.0}
    services.rewards.routes["GET /stats"] = lambda _: {"judge": figures}
    steps = services.steps()
    steps.next()
    assert figures.items() <= steps.metrics.items()
    export(steps.metrics)
    assert REGISTRY.get_sample_value("trainer_judge", {"figure": "failures_timeout"}) == 1
