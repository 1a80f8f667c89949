"""What /generate and OpenAI's chat completions take and give: the same tests against both engines."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.clients.rollout import RolloutClient, SamplingParams
from services.engines.engine import WorkerRefusedError
from services.protocol.rewards import FinishReason
from tests.services.rollout_server.conftest import logprobs_by
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS, eventually

PROMPT = [5, 12, 6, 14]  # "3+4*"
END = 1


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """The model as transformers computes it in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def generate(server: Nodes, *, worker: bool = True, ids: Sequence[int] = PROMPT, **fields: Any) -> httpx.Response:
    sampling = {key: fields.pop(key) for key in list(fields) if key not in TOP_LEVEL}
    payload = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 8, **sampling},
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        **fields,
    }
    return server.post(server.worker() if worker else server.router, "/generate", payload)


TOP_LEVEL = {"rid", "return_logprob", "logprob_start_len", "return_text_in_logprobs", "stream", "text"}


@pytest.mark.parametrize("worker", [True, False], ids=["worker", "router"])
def test_one_completion_is_an_object_with_the_fields_that_are_read(server: Nodes, worker: bool) -> None:
    reply = generate(server, worker=worker, ignore_eos=True).json()
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 8
    assert [pair[1] for pair in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(len(pair) == 3 and pair[0] <= 1e-3 and pair[2] is None for pair in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 8)
    assert isinstance(meta["cached_tokens"], int)
    assert isinstance(meta["id"], str)
    assert meta["weight_version"] == "0"
    assert [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]] == [("0", 0, 8)]
    assert isinstance(reply["text"], str)


def test_the_end_token_ends_a_completion_and_is_part_of_it(server: Nodes) -> None:
    replies = generate(server, n=16, max_new_tokens=64).json()
    ended = [reply for reply in replies if reply["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for reply in ended:
        assert reply["output_ids"][-1] == END
        assert reply["meta_info"]["output_token_logprobs"][-1][1] == END
        assert END not in reply["output_ids"][:-1]


def test_a_stop_token_id_ends_a_completion_and_is_part_of_it(server: Nodes) -> None:
    ids = generate(server, temperature=0.0, ignore_eos=True).json()["output_ids"]
    stop = ids[1]
    reply = generate(server, temperature=0.0, ignore_eos=False, stop_token_ids=[stop]).json()
    assert reply["output_ids"] == ids[: ids.index(stop) + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_greedy_tokens_are_those_of_transformers(server: Nodes, reference: Any) -> None:
    reply = generate(server, temperature=0.0, max_new_tokens=12, ignore_eos=True).json()
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    assert reply["output_ids"] == ids[len(PROMPT) :]


def test_logprobs_are_those_of_the_scaled_distribution_before_any_cut(server: Nodes, reference: Any) -> None:
    cuts = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 3},
        {"min_p": 0.2},
    ]
    for sampling in cuts:
        for reply in generate(server, n=4, ignore_eos=True, **sampling).json():
            given = [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]
            ids = [*PROMPT, *reply["output_ids"]]
            assert given == logprobs_by(reference, ids, len(PROMPT), sampling.get("temperature", 1.0)), sampling


async def test_a_sequence_is_rescored_without_generating(server: Nodes, reference: Any) -> None:
    ids = [*PROMPT, 9, END]
    wanted = logprobs_by(reference, ids)
    reply = generate(server, ids=ids, max_new_tokens=0, logprob_start_len=0).json()
    scored = reply["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == ids
    assert scored[0][0] is None
    assert [entry[0] for entry in scored[1:]] == wanted
    async with server.admin() as worker:
        assert await worker.rescore(ids) == wanted


def test_what_cannot_be_done_is_refused_with_400(server: Nodes) -> None:
    for wrong in (
        {"temperatur": 1.0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_new_tokens": -1},
        {"ids": [5] * 400},
    ):
        assert generate(server, **wrong).status_code == 400, wrong
    assert generate(server).status_code == 200


@pytest.mark.parametrize("seed_each", [False, True], ids=["a request a prompt", "a request a completion"])
async def test_the_client_gets_groups_through_the_router(server: Nodes, reference: Any, seed_each: bool) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0.8)
    async with RolloutClient(server.router, TOKEN, vocab_size=17, seed_each_completion=seed_each) as client:
        completions = await client.generate(PROMPT, params, n=8, seed=3)
    assert len(completions) == 8
    for completion in completions:
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert completion.oldest_version == 0
        ids = [*PROMPT, *completion.completion_ids.tolist()]
        assert completion.logprobs == logprobs_by(reference, ids, len(PROMPT), 0.8)


def test_health_needs_no_token_and_everything_else_does(server: Nodes) -> None:
    for endpoint in (server.worker(), server.router):
        assert httpx.get(endpoint.url + "/health", timeout=IDLE_SECONDS, trust_env=False).status_code == 200
        reply = httpx.post(
            endpoint.url + "/generate", json={"input_ids": PROMPT}, timeout=IDLE_SECONDS, trust_env=False
        )
        assert reply.status_code == 401


def test_a_worker_tells_what_it_serves(server: Nodes) -> None:
    info = server.get(server.worker(), "/model_info").json()
    assert info["weight_version"] == "0"
    assert info["is_generation"] is True
    assert info["model_path"] == str(server.model)
    assert server.get(server.worker(), "/server_info").json()["served_model_name"] == str(server.model)
    metrics = server.get(server.worker(), "/metrics")
    assert metrics.status_code == 200
    assert "# TYPE" in metrics.text


async def test_a_profile_shows_what_the_engine_computed(server: Nodes, tmp_path: Path) -> None:
    async with server.admin() as worker:
        with pytest.raises(WorkerRefusedError):
            await worker.end_profile()
        if server.engine == "embedded":  # records none
            with pytest.raises(WorkerRefusedError):
                await worker.begin_profile(tmp_path / "profile")
            return
    # Where SGLang's uvicorn lacks httptools, it closes the connection of a failed request without a word.
    async with server.admin() as worker:
        await worker.begin_profile(tmp_path / "profile")
        generate(server)
        await worker.end_profile()
    # SGLang answers before its trace is written.
    [trace] = await eventually(lambda: list((tmp_path / "profile").rglob("*trace.json.gz")))
    await eventually(lambda: b"aten::" in gzip.decompress(trace.read_bytes()))


# --- OpenAI's chat completions ---------------------------------------------------------------------------------------


QUESTION = [{"role": "user", "content": "3+4="}]


@pytest.fixture
def client(server: Nodes) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.router.url + "/v1", api_key=TOKEN, timeout=IDLE_SECONDS, max_retries=0) as made:
        yield made


def model_of(server: Nodes) -> str:
    return str(server.model)


def test_a_chat_completion_is_whole(client: openai.OpenAI, server: Nodes) -> None:
    reply = client.chat.completions.create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=0)
    assert reply.object == "chat.completion"
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 4
    assert reply.usage.total_tokens == 4 + reply.usage.completion_tokens


def test_several_chat_completions_come_with_their_places(client: openai.OpenAI, server: Nodes) -> None:
    reply = client.chat.completions.create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=1, n=3)
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, server: Nodes) -> None:
    def answer(**options: Any) -> Any:
        create = client.chat.completions.create
        return create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=0, **options).choices[0]

    text = answer().message.content
    assert text
    cut = answer(stop=text[-1])
    assert (cut.message.content or "", cut.finish_reason) == (text[: text.index(text[-1])], "stop")


def test_the_models_are_listed_and_what_cannot_be_done_or_has_a_wrong_key_is_refused(
    client: openai.OpenAI, server: Nodes
) -> None:
    assert model_of(server) in [model.id for model in client.models.list()]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model=model_of(server), messages=QUESTION)
