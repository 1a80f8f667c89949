"""LoRA adapters on a worker: the same tests against the embedded engine and the real SGLang."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.clients.rollout import RolloutClient, SamplingParams
from services.engines.engine import Engine, WorkerRefusedError
from services.http.client import RequestRefusedError
from services.weights.policy_store import ADAPTER_NAME, CONFIG_FILE, WEIGHTS_FILE
from tests.adapters import RANK
from tests.services.rollout_server.conftest import PROBE as IDS
from tests.services.rollout_server.conftest import logprobs_by
from tests.services.rollout_server.nodes import TOKEN, Nodes, authorization
from tests.waiting import IDLE_SECONDS

PROMPT = IDS[:4]


@functools.cache
def reference(model: Path, adapter: Path | None) -> Any:
    """The model as transformers and PEFT compute it."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return (loaded if adapter is None else PeftModel.from_pretrained(loaded, adapter)).eval()


async def replace(worker: Engine, adapter: Path, version: int, *, finishes_requests: bool = True) -> None:
    await worker.hold("finish" if finishes_requests else "continue", for_adapter=True)
    await worker.load_adapter(adapter, version)
    await worker.resume()


async def test_an_adapter_is_computed_for_the_requests_that_name_it(
    server: Nodes, worker: Engine, adapters: list[Path]
) -> None:
    alone = logprobs_by(reference(server.model, None), IDS)
    for version, adapter in enumerate(adapters, start=1):
        await replace(worker, adapter, version)
        assert await worker.version() == version
        assert await worker.adapter_path() == str(adapter)
        found = await worker.rescore(IDS, ADAPTER_NAME)
        assert found == logprobs_by(reference(server.model, adapter), IDS)
        assert found != logprobs_by(reference(server.model, None), IDS, tolerance=0.1)
        assert await worker.rescore(IDS) == alone


async def test_the_router_forwards_the_name_of_the_adapter(server: Nodes, worker: Engine, adapters: list[Path]) -> None:
    await replace(worker, adapters[0], 3)
    async with RolloutClient(server.router, TOKEN, vocab_size=17, lora_path=ADAPTER_NAME) as client:
        completions = await client.generate(PROMPT, SamplingParams(max_new_tokens=8), n=4)
    for completion in completions:
        assert {*completion.policy_versions.tolist()} == {3}
        ids = [*PROMPT, *completion.completion_ids.tolist()]
        assert completion.logprobs == logprobs_by(reference(server.model, adapters[0]), ids, len(PROMPT))


async def test_openai_routes_take_the_adapter_after_a_colon_in_the_model(
    server: Nodes, worker: Engine, adapters: list[Path]
) -> None:
    await replace(worker, adapters[1], 4)
    body = {"messages": [{"role": "user", "content": "3+4="}], "max_tokens": 1, "temperature": 0, "logprobs": True}
    ids = AutoTokenizer.from_pretrained(server.model).apply_chat_template(
        body["messages"], add_generation_prompt=True, return_dict=False
    )
    adapter: Path | None
    for adapter, fields in (
        (adapters[1], {"model": f"{server.model}:{ADAPTER_NAME}"}),
        (adapters[1], {"model": str(server.model), "lora_path": ADAPTER_NAME}),
        (None, {"model": str(server.model)}),
    ):
        [choice] = server.post(server.worker(), "/v1/chat/completions", body | fields).json()["choices"]
        given = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        likeliest = int(reference(server.model, adapter)(torch.tensor([ids])).logits[0, -1].argmax())
        assert given == logprobs_by(reference(server.model, adapter), [*ids, likeliest], len(ids))


async def test_a_request_for_an_adapter_that_is_not_loaded_is_refused(server: Nodes, worker: Engine) -> None:
    async with RolloutClient(server.worker(), TOKEN, vocab_size=17, lora_path="never-loaded") as client:
        with pytest.raises(RequestRefusedError, match="loaded"):
            await client.generate(PROMPT, SamplingParams(max_new_tokens=2), n=1)


async def test_an_adapter_of_another_rank_is_refused(
    server: Nodes, worker: Engine, adapters: list[Path], tmp_path: Path
) -> None:
    config = json.loads((adapters[0] / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"r": RANK + 1}))
    (tmp_path / WEIGHTS_FILE).write_bytes((adapters[0] / WEIGHTS_FILE).read_bytes())
    before = await worker.version()
    await worker.hold("finish", for_adapter=True)
    with pytest.raises(WorkerRefusedError, match="400"):
        await worker.load_adapter(tmp_path, 6)
    await worker.resume()
    assert await worker.version() == before
    assert await worker.adapter_path() is None


@pytest.mark.parametrize("finishes_requests", [True, False])
async def test_requests_in_flight_end_or_go_on_and_never_mix_adapters_unsaid(
    server: Nodes, worker: Engine, adapters: list[Path], finishes_requests: bool
) -> None:
    """SGLang aborts requests where the embedded engine continues them; either way each token has its version."""
    await replace(worker, adapters[0], 10)
    payload = {
        "input_ids": PROMPT,
        "sampling_params": {"n": 4, "max_new_tokens": 200, "ignore_eos": True},
        "return_logprob": True,
        "lora_path": ADAPTER_NAME,
    }
    async with httpx.AsyncClient(base_url=server.worker().url, headers=authorization(), timeout=IDLE_SECONDS) as http:
        pending = asyncio.create_task(http.post("/generate", json=payload))
        await asyncio.sleep(0.1)
        await replace(worker, adapters[1], 11, finishes_requests=finishes_requests)
        replies: list[dict[str, Any]] = (await pending).json()
    for reply in replies:
        meta = reply["meta_info"]
        if finishes_requests:
            assert len(reply["output_ids"]) == 200
            assert len(meta["weight_versions"]) == 1
        given = [pair[0] for pair in meta["output_token_logprobs"]]
        ids = [*PROMPT, *reply["output_ids"]]
        for span in meta["weight_versions"]:
            model = reference(server.model, adapters[int(span["version"]) - 10])
            start, end = span["start"], span["end"]
            assert given[start:end] == logprobs_by(model, ids[: len(PROMPT) + end], len(PROMPT) + start)
