"""Weights by broadcast: a trainer process sends them, the engine takes all of them or none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.embedded_engine import weight_routes
from services.embedded_engine.app import create_app
from services.weights.broadcast_group import flattened
from tests.ports import free_port
from tests.services.embedded_engine.conftest import PROMPT, settings_for
from tests.tolerance import engine_tolerance
from tests.waiting import IDLE_SECONDS

Serving = Callable[..., Any]
GROUP = "weights"


class Trainer:
    """Rank 0, in a thread: broadcasts the first ``count`` of the model's tensors, times 1.5, or a bucket, and leaves.

    Torch's groups have one rank of a process, so this one has a group of gloo's own.
    """

    def __init__(self, model: Path, port: int, count: int | None = None, *, is_flattened: bool = False) -> None:
        scaled = [(x * 1.5).to(torch.bfloat16) for x in load_file(model / "model.safetensors").values()]
        self._tensors = [flattened(scaled, torch.device("cpu"))] if is_flattened else scaled[:count]
        self._port = port
        self.engine_joined = threading.Event()
        self._left = ThreadPoolExecutor(1).submit(self._run)

    def _run(self) -> None:
        limit = timedelta(seconds=IDLE_SECONDS)
        store = dist.TCPStore("127.0.0.1", self._port, 2, is_master=True, timeout=limit)  # type: ignore[attr-defined]
        for prefix in (GROUP, f"{GROUP}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        group = dist.ProcessGroupGloo(store, 0, 2, limit)  # type: ignore[attr-defined]
        # A member that leaves before the others have joined would break their connections.
        assert self.engine_joined.wait(IDLE_SECONDS)
        for tensor in self._tensors:
            group.broadcast(tensor, 0).wait()

    async def leave(self) -> None:
        await asyncio.wait_for(asyncio.wrap_future(self._left), IDLE_SECONDS)


def description(model: Path) -> dict[str, Any]:
    tensors = load_file(model / "model.safetensors")
    return {
        "names": list(tensors),
        "dtypes": ["bfloat16"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": GROUP,
        "flush_cache": True,
        "weight_version": "3",
    }


async def join(client: httpx.AsyncClient, port: int, trainer: Trainer | None = None) -> httpx.Response:
    """Have the engine join; ``trainer`` goes on afterwards."""
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    reply: httpx.Response = await client.post(
        "/init_weights_update_group", json={**group, "group_name": GROUP, "backend": "gloo"}, timeout=IDLE_SECONDS
    )
    if trainer is not None:
        trainer.engine_joined.set()
    return reply


async def logprobs(client: httpx.AsyncClient) -> list[float]:
    payload = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    reply = (await client.post("/generate", json={**payload, "logprob_start_len": 0})).json()
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


async def version(client: httpx.AsyncClient) -> str:
    return str((await client.get("/model_info")).json()["weight_version"])


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_broadcast_weights_serve_after_the_update_ends(
    serving: Serving, tiny_model: Path, load_format: str | None
) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        before = await logprobs(client)
        port = free_port()
        is_flattened = load_format is not None
        trainer = Trainer(tiny_model, port, is_flattened=is_flattened)
        assert (await join(client, port, trainer)).json()["success"] is True
        assert (await client.post("/begin_weight_update", json={"selector": "all"})).json()["success"] is True
        whole = description(tiny_model) | {"load_format": load_format}
        sent = await client.post("/update_weights_from_distributed", json=whole, timeout=IDLE_SECONDS)
        assert sent.json()["success"] is True
        await trainer.leave()
        assert (await version(client), await logprobs(client)) == ("0", before)
        assert (await client.post("/end_weight_update", json={})).json()["success"] is True
        assert await version(client) == "3"
        changed = await logprobs(client)
        assert changed != before
        await client.post("/destroy_weights_update_group", json={"group_name": GROUP})
    # The same weights from a directory give the same, which shows that nothing was mixed up.
    assert changed == pytest.approx(await from_directory(serving, tiny_model), abs=engine_tolerance())


async def from_directory(serving: Serving, tiny_model: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if name != "lm_head.weight":
                parameter.copy_((parameter * 1.5).to(torch.bfloat16))
        wanted = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [float(wanted[place, token]) for place, token in enumerate(PROMPT[1:])]


async def test_a_broadcast_that_breaks_off_leaves_weights_and_version(serving: Serving, tiny_model: Path) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        before = await logprobs(client)
        port = free_port()
        trainer = Trainer(tiny_model, port, count=20)
        assert (await join(client, port, trainer)).status_code == 200
        await client.post("/begin_weight_update", json={})
        broken = await client.post(
            "/update_weights_from_distributed", json=description(tiny_model), timeout=IDLE_SECONDS
        )
        assert broken.status_code == 400
        assert "broke off" in broken.json()["message"]
        await trainer.leave()
        assert (await client.post("/end_weight_update", json={})).status_code == 400
        assert (await version(client), await logprobs(client)) == ("0", before)
        # It can join the next group and catch up.
        port = free_port()
        trainer = Trainer(tiny_model, port)
        assert (await join(client, port, trainer)).status_code == 200
        await client.post("/begin_weight_update", json={})
        sent = await client.post("/update_weights_from_distributed", json=description(tiny_model), timeout=IDLE_SECONDS)
        assert sent.status_code == 200
        assert (await client.post("/end_weight_update", json={})).status_code == 200
        assert await version(client) == "3"
        await trainer.leave()


async def test_a_group_whose_members_do_not_come_keeps_no_update_waiting(
    serving: Serving, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, given_up = threading.Event(), threading.Event()

    def meet_nobody(*_: Any) -> Any:
        waiting.set()
        assert given_up.wait(120)
        raise RuntimeError("nobody came")

    async with serving(create_app(settings_for(tiny_model))) as client:
        monkeypatch.setattr(weight_routes, "join_weights_group", meet_nobody)
        joining = asyncio.create_task(join(client, free_port()))
        try:
            assert await asyncio.to_thread(waiting.wait, 60)
            assert (await client.post("/begin_weight_update", json={}, timeout=60)).status_code == 200
            assert (await client.post("/end_weight_update", json={}, timeout=60)).status_code == 200
            assert not joining.done()
        finally:
            given_up.set()
        refused = await joining
    assert refused.status_code == 400
    assert "did not meet" in refused.json()["message"]


async def test_what_is_out_of_order_or_does_not_fit_is_refused_before_anything_is_received(
    serving: Serving, tiny_model: Path
) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        whole = description(tiny_model)

        async def refused(payload: dict[str, Any]) -> str:
            reply = await client.post("/update_weights_from_distributed", json=payload)
            assert reply.status_code == 400
            return str(reply.json()["message"])

        assert "/begin_weight_update" in await refused(whole)
        assert (await client.post("/end_weight_update", json={})).status_code == 400
        await client.post("/begin_weight_update", json={})
        assert "/init_weights_update_group" in await refused(whole)
        assert (await client.post("/destroy_weights_update_group", json={"group_name": GROUP})).status_code == 400

        port = free_port()
        trainer = Trainer(tiny_model, port, count=0)
        assert (await join(client, port, trainer)).status_code == 200
        first = whole["names"][0]
        assert "is not part of the model" in await refused({**whole, "names": ["extra", *whole["names"][1:]]})
        assert f"{first} is [3]" in await refused({**whole, "shapes": [[3], *whole["shapes"][1:]]})
        assert "dtype 'int8'" in await refused({**whole, "dtypes": ["int8"] * len(whole["names"])})
        assert "do not go together" in await refused({**whole, "dtypes": []})
        end = await client.post("/end_weight_update", json={})
        assert end.status_code == 400
        assert "a part of the update was refused" in end.json()["message"]
        assert await version(client) == "0"
        await trainer.leave()
