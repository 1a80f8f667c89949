"""The batches of a torch policy: what they wait for, and decisions that do not depend on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.clients.play import Decision
from services.evaluation_head import checkpoint
from services.evaluation_head.torch_policy import KEPT_BATCHES, Batcher
from tests.services.evaluation_head import policies

STATE = np.zeros((1, 1), np.float32)


async def test_clients_that_come_one_after_the_other_soon_share_their_batches() -> None:
    sizes = []

    def compute(states: NDArray[np.float32]) -> Sequence[Decision]:
        sizes.append(len(states))
        time.sleep(0.08)
        return [Decision(0, None)] * len(states)

    async def play(batcher: Batcher) -> None:
        for _ in range(12):
            await batcher.submit(STATE)

    # A state waits for 0.05 s, less than a batch computes: whoever comes while one computes has waited enough.
    async with Batcher("clients", compute, batch_size=4, timeout_seconds=0.05) as batcher, asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(play(batcher))
            await asyncio.sleep(0.06)
    assert sizes[0] < 4
    assert sizes.count(4) >= 6


async def test_a_client_alone_is_soon_answered_without_a_wait_for_others() -> None:
    def compute(states: NDArray[np.float32]) -> Sequence[Decision]:
        return [Decision(0, None)] * len(states)

    async with Batcher("alone", compute, batch_size=32, timeout_seconds=0.3) as batcher:
        for _ in range(KEPT_BATCHES):
            await batcher.submit(STATE)
        started = time.monotonic()
        for _ in range(100):
            await batcher.submit(STATE)
        assert time.monotonic() - started < 100 * 0.3 / 2


class Scores(torch.nn.Module):
    """Two linear layers with random weights, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = torch.nn.Linear(2, 500), torch.nn.Linear(500, 3, bias=False)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, generator=generator)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(states)))


async def test_a_state_gets_the_same_decision_alone_and_in_any_batch(serving: Any, head: Any, tmp_path: Path) -> None:
    module = Scores()
    checkpoint.save_policy(module, tmp_path / "p.pt2", policies.PAIR, policies.THREE)
    states = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    async with serving(head(head_policies=f"scores={tmp_path / 'p.pt2'}", head_batch_size=40)) as client:

        async def logprobs(rows: torch.Tensor) -> list[float]:
            response = await client.post("/evaluate", json={"states": rows.tolist(), "logprobs": True})
            found: list[float] = response.json()["logprobs"]
            return found

        together = await logprobs(states)
        assert [(await logprobs(states[i : i + 1]))[0] for i in range(40)] == together
        assert await logprobs(states[:7]) == together[:7]
    with torch.no_grad():
        exact = module.double()(states.double()).log_softmax(-1).amax(-1)
    np.testing.assert_allclose(together, exact, atol=1e-5)
