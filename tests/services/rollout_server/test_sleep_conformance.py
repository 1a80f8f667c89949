"""Engines that give their memory away and take it back: the same tests against the embedded engine and the real SGLang.

SGLang on a CPU has no memory saver: its routes answer as on a GPU, and free nothing.
"""

from __future__ import annotations

import asyncio

import pytest

from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import DependencyLostError
from services.engines.engine import Engine, WorkerRefusedError
from tests.services.rollout_server.conftest import PROBE
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.tolerance import engine_tolerance
from tests.waiting import IDLE_SECONDS

PROMPT = [5, 12, 6, 14]
LONG = SamplingParams(max_new_tokens=240, temperature=1.0)


async def test_a_worker_that_woke_computes_as_before(worker: Engine) -> None:
    before = await worker.rescore(PROBE)
    assert not await worker.is_asleep()
    for _ in range(2):  # a second call changes nothing
        await worker.sleep()
        assert await worker.is_asleep()
        assert await worker.version() == 0, "the version that it will serve"
        assert await worker.scheduler_answers(2.0), "its launcher does not take it for dead"
    for _ in range(2):
        await worker.wake()
        assert not await worker.is_asleep()
    await worker.resume()
    assert await worker.rescore(PROBE) == pytest.approx(before, abs=engine_tolerance())


async def test_requests_wait_for_the_next_version(server: Nodes, worker: Engine) -> None:
    await worker.sleep()
    async with RolloutClient(server.router, TOKEN, vocab_size=17, deadline_seconds=IDLE_SECONDS) as rollouts:
        pending = asyncio.create_task(rollouts.generate(PROMPT, SamplingParams(max_new_tokens=4), n=2))
        await asyncio.sleep(0.3)
        assert not pending.done()
        await worker.hold("finish")
        await worker.load_model(server.model, 5)
        await worker.resume()
        completions = await pending
    assert {version for each in completions for version in each.policy_versions.tolist()} == {5}


async def test_a_sleep_ends_what_runs(server: Nodes, worker: Engine) -> None:
    async with RolloutClient(server.router, TOKEN, vocab_size=17, deadline_seconds=IDLE_SECONDS) as rollouts:
        pending = asyncio.create_task(rollouts.generate(PROMPT, LONG, n=4))
        await asyncio.sleep(0.05)
        await worker.sleep()
        await worker.wake()
        await worker.resume()
        assert len(await pending) == 4, "the client sent them again"


async def test_memory_that_was_not_released_cannot_be_taken_back(server: Nodes, worker: Engine) -> None:
    """The reason why the engine keeps the mark: SGLang's scheduler dies of a wake without a sleep."""
    with pytest.raises((WorkerRefusedError, DependencyLostError)):
        await worker._ask("POST", "/resume_memory_occupation", {})
    await asyncio.to_thread(server.wait_until, lambda: server.serves(0), "the engine, restarted if it died")
    await asyncio.to_thread(server.wait_registered, [0])
