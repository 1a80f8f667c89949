"""The rollout client against a router that answers as each test says."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from services.clients import rollout
from services.clients.rollout import MAX_ROUNDS, PIECE_TOKENS, RolloutClient, SamplingParams
from services.http.client import RequestRefusedError
from services.protocol.rewards import FinishReason
from tests.fake_service import FakeService, fake_service
from tests.waiting import IDLE_SECONDS, wait_until
from toys.arithmetic import END, PAD

PARAMS = SamplingParams(max_new_tokens=3, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(7,), stop=("Q:",))
Answer = Callable[[dict[str, Any]], Any]


def completion(kind: str = "length", tokens: int = 3, **meta: Any) -> dict[str, Any]:
    return {
        "text": "abc"[:tokens],
        "output_ids": list(range(tokens)),
        "meta_info": {
            "finish_reason": {"type": kind},
            "weight_version": "4",
            "output_token_logprobs": [[-0.5, token, None] for token in range(tokens)],
            **meta,
        },
    }


def group(request: dict[str, Any]) -> list[dict[str, Any]]:
    return [completion() for _ in range(request["sampling_params"]["n"])]


class Router:
    """Answers /generate in turn with ``answers``, and with whole groups after them; an integer is a status."""

    def __init__(self, service: FakeService) -> None:
        self.endpoint = service.endpoint
        self.answers: list[Answer | int] = []
        self.requests: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        service.routes["POST /generate"] = self.answer

    def answer(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            answer = self.answers.pop(0) if self.answers else group
        time.sleep(self.seconds)
        with self._lock:
            self.in_flight -= 1
        return answer(request) if callable(answer) else answer


@pytest.fixture
def router() -> Iterator[Router]:
    with fake_service({}) as service:
        yield Router(service)


def client(router: Router, **options: Any) -> RolloutClient:
    return RolloutClient(router.endpoint, "secret", vocab_size=100, **({"deadline_seconds": 20} | options))


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_group_is_one_request_with_token_ids_and_n(router: Router) -> None:
    before = counted("rollout_requests_total"), counted("rollout_tokens_total")
    async with client(router) as rollouts:
        completions = await rollouts.generate([1, 2, 3], PARAMS, n=4, seed=2**31 + 5)
    assert router.requests == [
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {
                "max_new_tokens": 3,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 5,
                "stop_token_ids": [7],
                "stop": ["Q:"],
                "n": 4,
                "sampling_seed": 5,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
        }
    ]
    assert len(completions) == 4
    for one in completions:
        assert one.completion_ids.tolist() == [0, 1, 2]
        assert one.logprobs.tolist() == [-0.5] * 3
        assert one.finish_reason is FinishReason.LENGTH
        assert one.policy_versions.tolist() == [4] * 3
    assert counted("rollout_requests_total") == before[0] + 1
    assert counted("rollout_tokens_total") == before[1] + 12


@pytest.mark.parametrize("prompt", [[1, 100], [-1], []], ids=str)
async def test_a_prompt_outside_the_vocabulary_is_refused_before_it_is_sent(router: Router, prompt: list[int]) -> None:
    async with client(router) as rollouts:
        with pytest.raises(ValueError, match=r"vocabulary|at least one token"):
            await rollouts.generate(prompt, PARAMS, n=2)
    assert router.requests == []


async def test_only_what_was_aborted_or_is_missing_is_asked_for_again(router: Router) -> None:
    before = [counted("rollout_resubmitted_total", reason=reason) for reason in ("aborted", "missing")]
    router.answers = [lambda _: [completion(), completion("abort", 1), completion()]]
    async with client(router) as rollouts:
        completions = await rollouts.generate([1], PARAMS, n=4, seed=10)
    sampling = sorted((request["sampling_params"] for request in router.requests), key=lambda p: p["sampling_seed"])
    assert [params["n"] for params in sampling] == [4, 1, 1]
    # Another seed, or the same tokens would come as the two that are there.
    assert [params["sampling_seed"] for params in sampling] == [10, 11, 12]
    assert len(completions) == 4
    assert all(one.finish_reason is not FinishReason.ABORT for one in completions)
    after = [counted("rollout_resubmitted_total", reason=reason) for reason in ("aborted", "missing")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]


async def test_a_group_that_stays_short_is_given_short_and_counted(router: Router) -> None:
    missing = counted("rollout_missing_total")
    router.answers = [lambda _: [completion()], *[lambda _: [completion("abort", 0)]] * MAX_ROUNDS]
    async with client(router) as rollouts:
        assert len(await rollouts.generate([1], PARAMS, n=3)) == 1
    assert len(router.requests) == 1 + MAX_ROUNDS
    assert counted("rollout_missing_total") == missing + 2


def counting(kind: str = "length", most: int | None = None, version: str = "4") -> Answer:
    """A completion that goes on counting: the token at a place of the sequence is that place, modulo 90."""

    def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
        sampling, start = request["sampling_params"], len(request["input_ids"])
        tokens = range(start, start + (sampling["max_new_tokens"] if most is None else most))
        ids = [place % 90 for place in tokens]
        reply = completion(kind, 0, weight_version=version)
        reply["meta_info"]["output_token_logprobs"] = [
            [-place / 1e5, token, None] for place, token in zip(tokens, ids, strict=True)
        ]
        return [reply | {"text": "".join(chr(33 + token) for token in ids)}] * sampling["n"]

    return answer


async def test_an_aborted_completion_goes_on_from_its_tokens(router: Router) -> None:
    router.answers = [counting("abort", 5), counting("abort", 0), counting(version="6")]
    async with client(router) as rollouts:
        [one] = await rollouts.generate([1, 2], SamplingParams(max_new_tokens=8), n=1)
    assert [request["input_ids"] for request in router.requests] == [[1, 2], *[[1, 2, 2, 3, 4, 5, 6]] * 2]
    assert [request["sampling_params"]["max_new_tokens"] for request in router.requests] == [8, 3, 3]
    assert one.completion_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert one.logprobs.tolist() == [-place / 1e5 for place in range(2, 10)]
    assert one.policy_versions.tolist() == [4] * 5 + [6] * 3
    assert one.finish_reason is FinishReason.LENGTH
    assert one.completion == "".join(chr(33 + token) for token in range(2, 10))


async def test_a_worker_that_dies_in_a_long_completion_costs_one_piece(router: Router) -> None:
    length = 2 * PIECE_TOKENS + 10

    def goes_on(request: dict[str, Any]) -> Any:
        is_last = len(request["input_ids"]) > 2 * PIECE_TOKENS
        return (counting("stop", 3) if is_last else counting())(request)

    # The pieces of both completions are asked for in any order.
    router.answers = [goes_on, 500, *[goes_on] * 4]
    async with client(router) as rollouts:
        found = await rollouts.generate([1], SamplingParams(max_new_tokens=length), n=2)
    asked = [len(request["input_ids"]) for request in router.requests]
    assert sorted(asked) == sorted([1, *[1 + PIECE_TOKENS] * 3, *[1 + 2 * PIECE_TOKENS] * 2])
    assert sum(request["sampling_params"]["n"] for request in router.requests) == 7
    for one in found:
        count = len(one.completion_ids)
        assert one.completion_ids.tolist() == [place % 90 for place in range(1, 1 + count)]
        assert one.finish_reason is FinishReason.STOP
        assert one.policy_versions.tolist() == [4] * count
        assert count == 2 * PIECE_TOKENS + 3


async def test_a_completion_goes_on_while_a_sibling_is_slow(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "PIECE_TOKENS", 4)
    is_over = threading.Event()

    def slow(request: dict[str, Any]) -> Any:
        assert is_over.wait(IDLE_SECONDS), "the sibling waits for this piece"
        return counting()(request)

    def goes_on(request: dict[str, Any]) -> Any:
        if len(request["input_ids"]) == 1 + 12:
            is_over.set()
        return counting()(request)

    router.answers = [counting(), slow, *[goes_on] * 5]
    async with client(router) as rollouts:
        found = await rollouts.generate([1], SamplingParams(max_new_tokens=16), n=2, seed=10)
    assert [one.completion_ids.tolist() for one in found] == [list(range(1, 17))] * 2
    assert [len(request["input_ids"]) for request in router.requests[:5]] == [1, 5, 5, 9, 13]
    # Each completion has every second seed after the first one, however long the other takes.
    seeds = [request["sampling_params"]["sampling_seed"] for request in router.requests]
    assert seeds[:1] + sorted(seeds[1:3]) == [10, 11, 12]
    assert seeds[3:5] == [seeds[2] + 2, seeds[2] + 4]
    assert seeds[5:] == [seeds[1] + 2, seeds[1] + 4]


async def test_where_one_request_is_refused_its_siblings_send_no_other(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "PIECE_TOKENS", 4)
    is_refused = threading.Event()

    def late(request: dict[str, Any]) -> Any:
        assert is_refused.wait(IDLE_SECONDS)
        return counting()(request)

    router.answers = [counting(), 400, late]
    async with client(router) as rollouts:
        with pytest.raises(RequestRefusedError):
            await rollouts.generate([1], SamplingParams(max_new_tokens=16), n=2)
        is_refused.set()
        wait_until(lambda: router.in_flight == 0, "the sibling is answered")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
    assert len(router.requests) == 3


@pytest.fixture
def byte_model(tmp_path: Path) -> str:
    """A model directory whose tokenizer has a token a byte: byte b is token b + 2, and the end token is 1."""
    letters = bytes_to_unicode()
    vocabulary = {PAD: 0, END: 1} | {letters[byte]: 2 + byte for byte in range(256)}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token=PAD, eos_token=END).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    return str(tmp_path)


def writing(ids: list[int], aborts_at: int | None = None) -> Answer:
    """The completion ``ids`` of the prompt [1], whose pieces are decoded one by one, as engines do."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        start = len(request["input_ids"]) - 1
        piece = ids[start : start + (aborts_at or request["sampling_params"]["max_new_tokens"])]
        kind = "abort" if aborts_at else "stop" if start + len(piece) == len(ids) else "length"
        reply = completion(kind, 0)
        reply["meta_info"]["output_token_logprobs"] = [[-0.5, token, None] for token in piece]
        return reply | {"text": bytes(token - 2 for token in piece if token > 1).decode(errors="replace")}

    return answer


ENDS = {"end token": [1], "stop token": [2 + ord("$")], "stop text": [2 + byte for byte in b"Q:"]}


@pytest.mark.parametrize("end", ENDS)
async def test_a_character_that_two_pieces_share_is_whole(
    router: Router, byte_model: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "8 \N{EURO SIGN} = \N{GRINNING FACE}"
    ids = [2 + byte for byte in text.encode()] + ENDS[end]
    params = SamplingParams(max_new_tokens=40, stop_token_ids=ENDS["stop token"])
    if end == "stop text":
        # Then there are no pieces, but an aborted completion goes on.
        params = SamplingParams(max_new_tokens=40, stop=("Q:",))
        router.answers = [writing(ids, aborts_at=4), writing(ids)]
    else:
        monkeypatch.setattr(rollout, "PIECE_TOKENS", 4)
        router.answers = [writing(ids)] * 4
    async with client(router, model_name=byte_model) as rollouts:
        [one] = await rollouts.generate([1], params, n=1)
    assert one.completion_ids.tolist() == ids
    assert one.completion == text


async def test_what_a_worker_cannot_answer_is_tried_again(router: Router) -> None:
    router.answers = [503, 500, 429]
    async with client(router) as rollouts:
        assert len(await rollouts.generate([1], PARAMS, n=2)) == 2
    assert len(router.requests) == 4


async def test_what_is_no_completion_is_tried_again_and_never_used(router: Router) -> None:
    lost = counted("rollout_requests_lost_total")
    router.answers = [lambda _: [{"text": "no ids"}], lambda _: [completion(weight_version="not ours")]]
    async with client(router) as rollouts:
        completions = await rollouts.generate([1], PARAMS, n=2)
    assert [one.completion_ids.tolist() for one in completions] == [[0, 1, 2]] * 2
    assert counted("rollout_requests_lost_total") == lost + 2


NOT_LOADED = (400, {"detail": "LoRA adapter policy is not loaded; loaded is none"})


async def test_a_request_waits_for_the_first_version_of_the_trained_adapter(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "ADAPTER_POLL_SECONDS", 0.01)
    router.answers = [lambda _: NOT_LOADED] * 9
    async with client(router, lora_path="policy") as rollouts:
        assert len(await rollouts.generate([1], PARAMS, n=2)) == 2
    assert len(router.requests) == 10
    router.answers = [lambda _: NOT_LOADED] * 2
    async with client(router, lora_path="other") as rollouts:
        with pytest.raises(RequestRefusedError):
            await rollouts.generate([1], PARAMS, n=2)


async def test_a_prompt_that_waits_for_its_place_loses_nothing_of_its_deadline(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client's clock shows a third of the deadline more after each answer, and so 1.3 deadlines after all.
    clock = SimpleNamespace(monotonic=lambda: len(router.requests) * IDLE_SECONDS / 3)
    monkeypatch.setattr(rollout, "time", clock)
    async with client(router, max_concurrency=1, deadline_seconds=IDLE_SECONDS) as rollouts:
        groups = await asyncio.gather(*(rollouts.generate([number], PARAMS, n=2) for number in range(4)))
    assert [len(group) for group in groups] == [2] * 4


async def test_each_completion_has_a_seed_of_its_own_where_engines_are_deterministic(router: Router) -> None:
    def refuse_11_and_cut_12_short(request: dict[str, Any]) -> Any:
        return {11: 500, 12: [completion("abort", 1)]}.get(request["sampling_params"]["sampling_seed"], group(request))

    router.answers = [refuse_11_and_cut_12_short] * 6
    async with client(router, seed_each_completion=True) as rollouts:
        completions = await rollouts.generate([1], PARAMS, n=4, seed=10)
    assert len(completions) == 4
    sampling = [request["sampling_params"] for request in router.requests]
    assert [params["n"] for params in sampling] == [1] * 6
    # What failed is asked for with yet other seeds, which follow from its own first one.
    assert sorted(params["sampling_seed"] for params in sampling) == [10, 11, 12, 13, 15, 16]


async def test_no_more_requests_are_in_flight_than_allowed(router: Router) -> None:
    router.seconds = 0.05
    async with client(router, max_concurrency=3) as rollouts:
        groups = await asyncio.gather(*(rollouts.generate([number], PARAMS, n=2) for number in range(12)))
    assert [len(group) for group in groups] == [2] * 12
    assert router.most_in_flight == 3
