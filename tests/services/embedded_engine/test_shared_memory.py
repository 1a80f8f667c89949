"""Weights on a GPU that trainer and engine share, whose handles are not opened here: the engine takes all or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from services.embedded_engine import weight_routes
from services.embedded_engine.app import create_app
from services.weights.shared_tensors import BucketError
from tests.services.embedded_engine.conftest import settings_for
from tests.services.embedded_engine.test_broadcast import from_directory, logprobs, version
from tests.tolerance import engine_tolerance

Serving = Callable[..., Any]


async def update(client: httpx.AsyncClient, number: int, bucket: str, fault: str = "") -> list[bool]:
    """Have the engine take a bucket as a version; return the success of each request."""
    body = {
        "serialized_named_tensors": [bucket],
        "load_format": "flattened_bucket",
        "weight_version": str(number),
    }
    requests = [
        ("/begin_weight_update", {"selector": "all"}),
        ("/update_weights_from_tensor", body),
        ("/end_weight_update", {}),
    ]
    replies = [await client.post(path, json=json) for path, json in requests[fault == "closed" :]]
    return [reply.json()["success"] for reply in replies]


@pytest.fixture(autouse=True)
def buckets(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets whose texts are names: the model's weights in bfloat16 and times 1.5, and these without a tensor."""
    whole = {name: (x * 1.5).to(torch.bfloat16) for name, x in load_file(tiny_model / "model.safetensors").items()}

    def unpack(text: str) -> dict[str, torch.Tensor]:
        if text == "gone":
            raise BucketError("the bucket cannot be read: its memory is not there")
        return {name: x for name, x in whole.items() if text == "whole" or name != "model.norm.weight"}

    monkeypatch.setattr(weight_routes, "unpack_bucket", unpack)


async def test_shared_weights_serve_after_the_update_ends(serving: Serving, tiny_model: Path) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        before = await logprobs(client)
        assert await update(client, 3, "whole") == [True] * 3
        assert await version(client) == "3"
        changed = await logprobs(client)
    assert changed != before
    assert changed == pytest.approx(await from_directory(serving, tiny_model), abs=engine_tolerance())


@pytest.mark.parametrize("fault", ["gone", "not whole", "closed"])
async def test_a_version_that_is_not_whole_is_never_served(serving: Serving, tiny_model: Path, fault: str) -> None:
    async with serving(create_app(settings_for(tiny_model))) as client:
        before = await logprobs(client)
        assert not all(await update(client, 3, "whole" if fault == "closed" else fault, fault))
        assert (await version(client), await logprobs(client)) == ("0", before)
        assert await update(client, 4, "whole") == [True] * 3, "the next version is served"
        assert await version(client) == "4"
