"""A teacher behind an endpoint: what it says of sampled tokens, and endpoints that cannot teach."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from transformers import AutoTokenizer

from services.clients.teacher import TeacherClient
from services.core.errors import ConfigurationError, DependencyLostError
from services.embedded_engine.app import create_app
from services.engines.settings import EngineSettings
from services.protocol.base import PROBE
from services.protocol.groups import TEACHER
from services.protocol.prompts import Prompt
from services.protocol.rewards import UNASKED
from tests.fake_service import FakeService, fake_service
from tests.sequences import make_group, trained_sequence
from tests.services.run_page.serving import served_ready
from tests.tolerance import logprob_tolerance
from tests.toy_models import byte_tokenizer
from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import plain_forward, plain_model
from tests.waiting import IDLE_SECONDS
from toys import arithmetic
from trainer.algorithm.packing import TrainingGroup
from trainer.capacity.__main__ import unreachable_teachers
from trainer.checkpoints.state import TeacherPrint
from trainer.config import TrainerSettings
from trainer.model.ranks import join_ranks
from trainer.model.teachers import check_endpoints
from trainer.rollouts.groups import Answers, Completions, GroupMaker

T = TypeVar("T")
PROMPT = [5, 12, 6, 15]
SEQUENCES = [
    trained_sequence([9, 10, 1], [-1.0, -2.0, -0.5]),
    trained_sequence([9, 4, 4, 7, 1], [-1.0, 0.0, 0.0, -2.0, -0.5], loss_mask=[True, False, False, True, True]),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the student's tokenizer and other weights."""
    directory = tmp_path_factory.mktemp("teacher")
    arithmetic.build_tokenizer().save_pretrained(directory)
    arithmetic.build_model(seed=3).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def endpoint(teacher: Path) -> Iterator[str]:
    """The URL of an engine that serves the teacher."""
    with served_ready(create_app(EngineSettings.load(model_name=str(teacher), engine_dtype="float32"))) as url:
        yield url


def with_client(url: str, use: Callable[[TeacherClient], Awaitable[T]], longest: int = 8) -> T:
    async def run() -> T:
        async with TeacherClient(url, longest, deadline=IDLE_SECONDS) as client:
            return await use(client)

    return asyncio.run(run())


def test_a_group_gets_the_teachers_values_at_its_sampled_tokens(tiny_model: Path, teacher: Path, endpoint: str) -> None:
    fields = {"model_name": str(tiny_model), "teacher_url": endpoint, "max_new_tokens": 8}
    settings = TrainerSettings.load(**fields, reward_weight=0)
    sampler = Completions(settings, cast(Any, None), cast(Any, None))

    async def answer(prompt: Prompt, *_: Any, **__: Any) -> Answers:
        unscored = [s.model_copy(update={"result": UNASKED}) for s in SEQUENCES]
        return Answers(prompt.prompt_ids, unscored)

    sampler.answer = answer  # type: ignore[method-assign]
    prompt = make_group(sequences=SEQUENCES, prompt_ids=PROMPT).prompt

    async def make() -> Any:
        assert sampler.teacher is not None
        async with sampler.teacher:
            await sampler.awaited()["teacher"](60)
            return await GroupMaker(settings, sampler).make_group(prompt)

    group = asyncio.run(make())
    wanted = plain_forward(plain_model(teacher), TrainingGroup(PROMPT, SEQUENCES))
    for sequence, (logprobs, _) in zip(group.sequences, wanted, strict=True):
        expected = np.where(sequence.mask, logprobs.detach().numpy(), 0.0)
        np.testing.assert_allclose(sequence.arrays[TEACHER], expected, atol=logprob_tolerance("float32"))


def test_the_runs_own_engine_is_no_teacher(tiny_model: Path, teacher: Path, endpoint: str) -> None:
    async def probe(client: TeacherClient) -> TeacherClient:
        await client.wait_ready(60)
        return client

    client = with_client(endpoint, probe)
    with join_ranks() as ranks:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        check_endpoints([client], tokenizer, make_learner(ranks, tiny_model).logprobs)
        with pytest.raises(ConfigurationError, match="has another tokenizer than the student: it splits a text into"):
            check_endpoints([client], byte_tokenizer(["<pad>"]), make_learner(ranks, tiny_model).logprobs)
        with pytest.raises(ConfigurationError, match=r"the student's own log-probabilities, to 0.000 nats"):
            check_endpoints([client], tokenizer, make_learner(ranks, teacher).logprobs)
    said = TeacherPrint(name="one", probe=client.probe)
    assert said.is_as(TeacherPrint(name="another name", probe=[x + 0.01 for x in client.probe]))
    assert not said.is_as(TeacherPrint(name="one", probe=[x + 0.3 for x in client.probe]))


def test_a_sequence_beyond_the_context_stays_without_values(tiny_model: Path, endpoint: str) -> None:
    long = trained_sequence([9] * 300, [-1.0] * 300)
    sequence = with_client(endpoint, lambda client: client.taught(PROMPT, long))
    assert TEACHER not in sequence.arrays


# --- endpoints that cannot teach -------------------------------------------------------------------------------------


def scores(ids: list[int], start: int, **changes: Any) -> dict[str, Any]:
    entries = [[None if place == start - 1 else -1.0, token, None] for place, token in enumerate(ids)][start - 1 :]
    return {"meta_info": {"input_token_logprobs": entries}} | changes


@pytest.fixture
def other(tiny_model: Path) -> Iterator[FakeService]:
    """An endpoint that answers as an engine does; tests change its routes."""
    ids = AutoTokenizer.from_pretrained(tiny_model)(PROBE)["input_ids"]

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        return scores(request.get("input_ids", ids), request["logprob_start_len"] + 1)

    routes = {"POST /generate": generate, "GET /get_server_info": lambda _: {"context_length": None}}
    with fake_service(routes) as service:
        yield service


@pytest.mark.parametrize(
    ("generate", "said"),
    [
        (None, r"does not score token ids: .*404.* Hosted APIs give no log-probabilities"),
        (lambda _: {"text": "Hello", "meta_info": {}}, "gave no log-probabilities of the prompt"),
        (lambda _: {"meta_info": {"input_token_logprobs": None}}, "gave no log-probabilities of the prompt"),
        (lambda request: scores(PROBE_IDS, 1) if "text" in request else unsteady(request), "gave other numbers"),
    ],
    ids=["no such route", "text alone", "null", "unsteady"],
)
def test_endpoints_that_cannot_teach_are_refused_in_a_sentence(
    tiny_model: Path, other: FakeService, generate: Any, said: str
) -> None:
    PROBE_IDS[:] = AutoTokenizer.from_pretrained(tiny_model)(PROBE)["input_ids"]
    other.routes["POST /generate"] = (lambda _: 404) if generate is None else generate
    with pytest.raises(ConfigurationError, match=said) as refused:
        with_client(other.endpoint.url, lambda client: client.wait_ready(20))
    assert str(refused.value).startswith(f"TEACHER_URL={other.endpoint.url} ")


def test_a_dry_run_probes_the_endpoint_and_says_which_is_out_of_reach(tiny_model: Path, other: FakeService) -> None:
    other.routes["POST /generate"] = lambda _: 404

    def settings(url: str) -> TrainerSettings:
        return TrainerSettings.load(model_name=str(tiny_model), teacher_url=url, max_new_tokens=8)

    with pytest.raises(ConfigurationError, match="does not score token ids"):
        list(unreachable_teachers(settings(other.endpoint.url)))
    (note,) = unreachable_teachers(settings("http://127.0.0.1:1"))
    assert note.startswith("TEACHER_URL=http://127.0.0.1:1 was not checked, because it does not answer: ")


PROBE_IDS: list[int] = []


def unsteady(request: dict[str, Any]) -> dict[str, Any]:
    reply = scores(request["input_ids"], request["logprob_start_len"] + 1)
    for entry in reply["meta_info"]["input_token_logprobs"][1:]:
        entry[0] -= 0.2
    return reply


def test_the_prefix_is_not_scored_again_and_its_place_is_right(tiny_model: Path, other: FakeService) -> None:
    sequence = with_client(other.endpoint.url, lambda client: client.taught(PROMPT, SEQUENCES[1]))
    [request] = other.asked("POST /generate")
    assert request["logprob_start_len"] == len(PROMPT) - 1
    assert request["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert sequence.arrays[TEACHER].tolist() == [-1.0, 0.0, 0.0, -1.0, -1.0]


def test_other_tokens_than_asked_for_end_the_run(tiny_model: Path, other: FakeService) -> None:
    other.routes["POST /generate"] = lambda request: scores([*request["input_ids"][1:], 3], 4)
    with pytest.raises(DependencyLostError, match="scored other tokens"):
        with_client(other.endpoint.url, lambda client: client.taught(PROMPT, SEQUENCES[0]))


LIES = {
    "above 0": 5.0,
    "beyond rounding": 0.01,
    "impossible": -1e308,
    "infinite": -math.inf,
    "not a number": math.nan,
    "null": None,
    "text": "low",
    "a list": [-1.0],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_is_not_a_log_probability_is_never_trained_on(tiny_model: Path, other: FakeService, lie: Any) -> None:
    usual = other.routes["POST /generate"]

    def one_false(request: dict[str, Any]) -> dict[str, Any]:
        reply = usual(request)
        reply["meta_info"]["input_token_logprobs"][-1][0] = lie
        return cast(dict[str, Any], reply)

    other.routes["POST /generate"] = one_false
    with pytest.raises(DependencyLostError, match=f"{other.endpoint.url} "):
        with_client(other.endpoint.url, lambda client: client.taught(PROMPT, SEQUENCES[0]))
    with pytest.raises(ConfigurationError, match="does not score token ids"):
        with_client(other.endpoint.url, lambda client: client.wait_ready(20))


def test_a_context_that_holds_no_answer_is_refused(tiny_model: Path, endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has a context of 256 tokens, but an answer may have 256"):
        with_client(endpoint, lambda client: client.wait_ready(60), longest=256)
