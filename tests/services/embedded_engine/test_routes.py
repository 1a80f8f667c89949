"""The embedded engine as an HTTP service: refusals, backpressure, clients that leave, a quiet end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.embedded_engine import app
from services.embedded_engine.app import create_app
from services.embedded_engine.engine import Engine
from tests.services.embedded_engine.conftest import PROMPT, settings_for
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until

Serving = Callable[..., Any]
StartService = Callable[..., Any]
ENGINE = "services.embedded_engine"


def body(ids: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT if ids is None else ids, "sampling_params": {"max_new_tokens": 4, **sampling}}


async def test_refused_requests_get_400_with_the_reason_and_change_nothing(serving: Serving, tiny_model: Path) -> None:
    refused = [
        (body(temperatur=1), "temperatur"),
        (body(top_p=0), "top_p"),
        (body(n=0), "n"),
        (body(frequency_penalty=0.5), "frequency_penalty is not supported"),
        (body([]), "no tokens"),
        (body([17]), "outside the vocabulary of 17"),
        (body([-1]), "outside the vocabulary"),
        (body([5] * 256), "context length is 256"),
        ({"sampling_params": {}}, "either as input_ids or as text"),
        ({**body(), "text": "3"}, "either as input_ids or as text"),
        ({**body(), "stream": True}, "stream is not supported"),
        ({**body(), "lora_path": "other"}, "LoRA adapter other is not loaded"),
        ({**body(), "return_logprob": True, "logprob_start_len": 4}, "beyond the prompt's 4 tokens"),
    ]
    async with serving(create_app(settings_for(tiny_model))) as client:
        for payload, reason in refused:
            reply = await client.post("/generate", json=payload)
            assert reply.status_code == 400, payload
            assert reason in reply.json()["detail"]
        assert (await client.get("/stats")).json()["generated_tokens"] == 0
        # What means nothing at its neutral value is not refused.
        neutral = {
            **body(frequency_penalty=0.0, repetition_penalty=1.0, min_p=None),
            "stream": False,
            "image_data": None,
        }
        assert (await client.post("/generate", json=neutral)).status_code == 200


async def test_a_full_queue_is_answered_429_with_when_to_try_again(
    serving: Serving, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "Engine", partial(Engine, max_queued=2))
    settings = settings_for(tiny_model, engine_max_running_requests=1)
    async with serving(create_app(settings)) as client:
        await client.post("/pause_generation", json={"mode": "retract"})
        waiting = [asyncio.create_task(client.post("/generate", json=body())) for _ in range(2)]
        async with asyncio.timeout(IDLE_SECONDS):
            while (await client.get("/stats")).json()["waiting"] < 2:  # noqa: ASYNC110  # it has no event for it
                await asyncio.sleep(0.001)  # the engine has no event for it
        refused = await client.post("/generate", json=body())
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        await client.post("/continue_generation", json={})
        assert [(await reply).status_code for reply in waiting] == [200, 200]
        assert (await client.post("/generate", json=body())).status_code == 200


async def test_a_request_that_is_aborted_before_its_prompt_is_computed_is_answered(
    serving: Serving, tiny_model: Path
) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        await client.post("/pause_generation", json={"mode": "retract"})
        asked = {**body(n=2), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        waiting = asyncio.create_task(client.post("/generate", json=asked))
        async with asyncio.timeout(IDLE_SECONDS):
            while not (await client.get("/stats")).json()["waiting"]:  # noqa: ASYNC110  # it has no event for it
                await asyncio.sleep(0.001)
        await client.post("/pause_generation", json={"mode": "abort"})
        reply = await waiting
        assert reply.status_code == 200
        for record in reply.json():
            assert record["meta_info"]["finish_reason"]["type"] == "abort"
            assert record["output_ids"] == record["meta_info"]["input_token_logprobs"] == []


async def test_health_answers_while_weights_load_and_requests_run(serving: Serving, tiny_model: Path) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        running = [asyncio.create_task(client.post("/generate", json=body(max_new_tokens=200))) for _ in range(8)]
        update = {"model_path": str(tiny_model), "weight_version": "1"}
        updating = asyncio.create_task(client.post("/update_weights_from_disk", json=update))
        while not updating.done():
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.001)  # requests within the process do not give other tasks a turn
        assert updating.result().status_code == 200
        assert [reply.status_code for reply in await asyncio.gather(*running)] == [200] * 8


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_place(start_service: StartService, tiny_model: Path) -> None:
    service = start_service(ENGINE, MODEL_NAME=str(tiny_model), ENGINE_MAX_RUNNING_REQUESTS="1")
    httpx.post(f"{service.url}/pause_generation", json={"mode": "retract"}, timeout=IDLE_SECONDS, trust_env=False)
    leaves = httpx.Timeout(IDLE_SECONDS, read=0.3)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/generate", json=body(max_new_tokens=200), timeout=leaves, trust_env=False)

    def waiting() -> int:
        return int(httpx.get(f"{service.url}/stats", timeout=IDLE_SECONDS, trust_env=False).json()["waiting"])

    wait_until(lambda: waiting() == 0, "a place")


@pytest.mark.slow
def test_sigterm_gives_running_requests_their_tokens_and_exits_with_0(
    start_service: StartService, tiny_model: Path
) -> None:
    service = start_service(ENGINE, MODEL_NAME=str(tiny_model))
    httpx.post(f"{service.url}/pause_generation", json={"mode": "retract"}, timeout=IDLE_SECONDS, trust_env=False)
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(httpx.post(f"{service.url}/generate", json=body(), timeout=IDLE_SECONDS, trust_env=False))

    thread = threading.Thread(target=ask)
    thread.start()
    while not httpx.get(f"{service.url}/stats", timeout=IDLE_SECONDS, trust_env=False).json()["waiting"]:
        assert thread.is_alive()
    assert service.terminate() == 0
    thread.join(IDLE_SECONDS)
    assert replies[0].status_code == 200
    assert replies[0].json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.slow
def test_a_model_that_cannot_be_had_ends_the_engine_with_one_line(start_service: StartService, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for name, reason in ((str(tmp_path), "MODEL_NAME="), ("no/such-model", "neither the hub nor its cache")):
        service = start_service(ENGINE, healthy=False, MODEL_NAME=name)
        assert service.process.wait(LIMIT_SECONDS) == 78
        assert reason in service.log.splitlines()[-1]
