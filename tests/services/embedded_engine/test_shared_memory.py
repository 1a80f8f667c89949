"""Weights in memory that trainer and engine share: the engine takes all of them or none."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from services.core.machine import memory_directory
from services.embedded_engine.compute import model
from services.embedded_engine.http.app import create_app
from services.weights.shared_tensors import SharedMemory, pack_bucket
from tests.services.embedded_engine.conftest import settings_for
from tests.services.embedded_engine.test_broadcast import from_directory, logprobs, version
from tests.tolerance import engine_tolerance

Serving = Callable[..., Any]


class Trainer:
    """Has a version of the model, in bfloat16 and times 1.5, in shared memory."""

    def __init__(self, directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        self.weights = {name: (value * 1.5).to(torch.bfloat16) for name, value in weights.items()}
        size = sum(value.nbytes for value in self.weights.values())
        self.memory = SharedMemory(memory_directory() / f"grpo-test-engine-{os.getpid()}", size)

    def body(self, number: int, leave_out: str = "") -> dict[str, Any]:
        self.memory.begin()
        kept = {name: value for name, value in self.weights.items() if name != leave_out}
        state = {name: self.memory.copy_of(value) for name, value in kept.items()}
        packed = pack_bucket(self.memory.finish(number), state)
        return {
            "serialized_named_tensors": [base64.b64encode(packed).decode()],
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": str(number),
        }


@pytest.fixture
def trainer(tiny_model: Path) -> Iterator[Trainer]:
    made = Trainer(tiny_model)
    yield made
    made.memory.remove()


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = (await client.post(path, json=body)).json()
    return reply


async def test_shared_weights_serve_after_the_update_ends(serving: Serving, tiny_model: Path, trainer: Trainer) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        before = await logprobs(client)
        assert (await post(client, "/begin_weight_update", {"selector": "all"}))["success"] is True
        assert (await post(client, "/update_weights_from_tensor", trainer.body(3)))["success"] is True
        assert (await version(client), await logprobs(client)) == ("0", before)
        assert (await post(client, "/end_weight_update", {}))["success"] is True
        assert await version(client) == "3"
        changed = await logprobs(client)
        # The engine has copied them: what the trainer writes next changes nothing.
        trainer.memory.begin()
        trainer.memory.copy_of(torch.full((trainer.memory._used,), float("nan")))
        assert await logprobs(client) == changed
    assert changed != before
    assert changed == pytest.approx(await from_directory(serving, tiny_model), abs=engine_tolerance())


@pytest.mark.parametrize(
    "fault", ["written over before", "written over meanwhile", "not whole", "not base64", "closed"]
)
async def test_a_version_that_is_not_whole_is_never_served(
    serving: Serving, tiny_model: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    body = trainer.body(3, leave_out="model.norm.weight" if fault == "not whole" else "")
    if fault == "not base64":
        body["serialized_named_tensors"] = ["?"]
    async with serving(create_app(settings_for(tiny_model))) as client:
        before = await logprobs(client)
        if fault != "closed":
            await post(client, "/begin_weight_update", {"selector": "all"})
        if fault == "written over before":
            trainer.memory.begin()
        replies = [await post(client, "/update_weights_from_tensor", body)]
        if fault == "written over meanwhile":
            real = model.pack_weights

            def pack(*args: Any) -> Any:
                packed = real(*args)
                trainer.memory.begin()
                return packed

            monkeypatch.setattr("services.embedded_engine.compute.loading.pack_weights", pack)
        replies.append(await post(client, "/end_weight_update", {}))
        assert not all(reply["success"] for reply in replies)
        assert (await version(client), await logprobs(client)) == ("0", before)
        # The next version is served.
        await post(client, "/begin_weight_update", {"selector": "all"})
        await post(client, "/update_weights_from_tensor", trainer.body(4))
        monkeypatch.undo()
        assert (await post(client, "/end_weight_update", {}))["success"] is True
        assert await version(client) == "4"
