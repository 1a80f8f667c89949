"""Pauses, weight changes and sleep: the same tests against the embedded engine and the real SGLang."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import DependencyLostError
from services.engines.engine import Engine, WorkerRefusedError
from services.weights.broadcast_group import join_weights_group, leave_weights_group, send_buckets
from tests.ports import free_ports
from tests.services.rollout_server.conftest import PROBE, logprobs_by
from tests.services.rollout_server.nodes import TOKEN, Nodes, authorization
from tests.tolerance import engine_tolerance
from tests.waiting import IDLE_SECONDS

PROMPT = [5, 12, 6, 14]
LONG = SamplingParams(max_new_tokens=240, temperature=1.0)
TRIES = 10


@pytest.fixture(scope="session")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    directory = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model, directory)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(tiny_model / "model.safetensors")
    changed = {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def client(server: Nodes) -> RolloutClient:
    return RolloutClient(server.router, TOKEN, vocab_size=17, deadline_seconds=IDLE_SECONDS)


class Flight:
    """Completions of 240 tokens each, which take a while: what happens to them meanwhile is what a test is about."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    def start(self, n: int = 4) -> asyncio.Task[list[dict[str, Any]]]:
        return asyncio.create_task(self._generate(n))

    async def _generate(self, n: int) -> list[dict[str, Any]]:
        payload = {
            "input_ids": PROMPT,
            "sampling_params": {"n": n, "max_new_tokens": 240, "ignore_eos": True},
            "return_logprob": True,
        }
        reply = await self._http.post("/generate", json=payload)
        assert reply.status_code == 200, reply.text
        return list(reply.json())


@pytest.fixture
async def flight(server: Nodes) -> AsyncIterator[Flight]:
    async with httpx.AsyncClient(base_url=server.worker().url, headers=authorization(), timeout=IDLE_SECONDS) as http:
        await http.get("/model_info")  # the connection is there when it is needed
        yield Flight(http)


def check_logprobs(model: Path, reply: dict[str, Any]) -> None:
    """Compare the log-probabilities of a completion with those of a model."""
    given = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert given == logprobs_by(model, [*PROMPT, *reply["output_ids"]], len(PROMPT))


async def test_weights_from_disk_change_what_is_served(server: Nodes, worker: Engine, other_model: Path) -> None:
    assert await worker.rescore(PROBE) == logprobs_by(server.model, PROBE)
    await worker.load_model(other_model, 7)
    assert await worker.version() == 7
    assert await worker.rescore(PROBE) == logprobs_by(other_model, PROBE)
    async with client(server) as rollouts:
        completions = await rollouts.generate(PROMPT, SamplingParams(max_new_tokens=4), n=4)
    for completion in completions:
        assert {*completion.policy_versions.tolist()} == {7}
        ids = [*PROMPT, *completion.completion_ids.tolist()]
        assert completion.logprobs == logprobs_by(other_model, ids, len(PROMPT))


async def test_neither_an_empty_update_nor_one_from_nowhere_changes_anything(
    server: Nodes, worker: Engine, tmp_path: Path
) -> None:
    await worker.drain()
    with pytest.raises(WorkerRefusedError, match="400"):
        await worker.load_model(tmp_path / "nothing", 8)
    assert await worker.version() == 0
    assert await worker.rescore(PROBE) == logprobs_by(server.model, PROBE)


async def test_weights_of_other_shapes_are_never_served(server: Nodes, worker: Engine, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(server.model, broken)
    weights = load_file(broken / "model.safetensors")
    # The last one, so that an engine which loads as it goes has changed the others already.
    weights = {name: weight * 1.5 for name, weight in weights.items()}
    weights["model.norm.weight"] = weights["model.norm.weight"][:-3].contiguous()
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    # SGLang tries to go back to the weights before, reads the same directory again, and dies of it.
    refusals = {"embedded": WorkerRefusedError, "sglang": (WorkerRefusedError, DependencyLostError)}
    with pytest.raises(refusals[server.engine]):
        await worker.load_model(broken, 9)
    await asyncio.to_thread(server.wait_until, lambda: server.serves(0), "the version before")
    server.wait_registered([0])
    assert await worker.rescore(PROBE) == logprobs_by(server.model, PROBE)


async def test_a_request_in_flight_goes_on_with_new_weights_and_tells_which_made_what(
    server: Nodes, worker: Engine, flight: Flight, other_model: Path
) -> None:
    replies = await mixed_versions(server, worker, flight, other_model)
    assert replies
    for reply in replies:
        assert len(reply["output_ids"]) == 240
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
        [sequence] = worker.read_completions("the worker", orjson.dumps(reply))
        versions = sequence.policy_versions.tolist()
        first = versions.index(11)
        assert versions == [0] * first + [11] * (240 - first)
        # Tokens of the first version come from the old weights alone.
        ids = [*PROMPT, *reply["output_ids"][:first]]
        assert sequence.logprobs[:first].tolist() == logprobs_by(server.model, ids, len(PROMPT))


async def mixed_versions(server: Nodes, worker: Engine, flight: Flight, other_model: Path) -> list[dict[str, Any]]:
    """Completions during which the weights changed; a pause may come before they begin, or when they are over."""
    for attempt in range(TRIES):
        pending = flight.start()
        await asyncio.sleep(0.02 * (1 + attempt) ** 2)
        await worker.pause("retract")
        try:
            await worker.load_model(other_model, 11)
        finally:
            await worker.resume()
        replies = await pending
        if all(len(reply["meta_info"]["weight_versions"]) == 2 for reply in replies):
            return replies
        await worker.load_model(server.model, 0)
    return []


async def test_requests_in_flight_end_before_a_worker_is_held(
    server: Nodes, worker: Engine, flight: Flight, other_model: Path
) -> None:
    pending = flight.start()
    await asyncio.sleep(0.05)
    await worker.hold("finish")
    await worker.load_model(other_model, 12)
    await worker.resume()
    for reply in await pending:
        assert len(reply["output_ids"]) == 240
        # All of one version: 12 only if it began after the change.
        (span,) = reply["meta_info"]["weight_versions"]
        model = server.model if span["version"] == "0" else other_model
        check_logprobs(model, reply)
    assert await worker.version() == 12


async def test_a_pause_that_aborts_gives_back_what_there_is(worker: Engine, flight: Flight) -> None:
    for attempt in range(TRIES):
        pending = flight.start()
        await asyncio.sleep(0.02 * (1 + attempt) ** 2)
        await worker.pause("abort")
        await worker.resume()
        replies = await pending
        for reply in replies:
            assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
        if all(reply["meta_info"]["finish_reason"]["type"] == "abort" for reply in replies):
            return
    pytest.fail("no request was aborted")


async def test_weights_come_by_broadcast(server: Nodes, worker: Engine, other_model: Path) -> None:
    weights = load_file(other_model / "model.safetensors")
    (port,) = free_ports(1)
    name = f"weights-{port}"

    def join() -> Any:
        return join_weights_group("127.0.0.1", port, 0, 2, name, "gloo", IDLE_SECONDS)

    def send(names: list[str]) -> None:
        send_buckets(
            [[weights[name].contiguous() for name in names]], torch.device("cpu"), group, IDLE_SECONDS, flattens=True
        )

    group, _ = await asyncio.gather(asyncio.to_thread(join), worker.join_group("127.0.0.1", port, 1, 2, name, "gloo"))
    try:
        await worker.begin_update()
        everything = list(weights)
        half = len(everything) // 2
        for names, version in ((everything[:half], None), (everything[half:], 13)):
            assert await worker.version() == 0
            shapes = [list(weights[n].shape) for n in names]
            await asyncio.gather(
                asyncio.to_thread(send, names),
                worker.receive_weights(names, ["float32"] * len(names), shapes, name, version, is_flattened=True),
            )
        await worker.end_update()
        assert await worker.version() == 13
        assert await worker.rescore(PROBE) == logprobs_by(other_model, PROBE)
    finally:
        await worker.leave_group(name)
        leave_weights_group(group)


async def test_what_has_no_open_update_is_refused(worker: Engine) -> None:
    for refused in (
        worker.receive_weights(["model.norm.weight"], ["float32"], [[96]], "no-such-group", 14),
        worker.end_update(),
    ):
        with pytest.raises(WorkerRefusedError, match="400"):
            await refused
    assert await worker.version() == 0


# --- sleep -----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_woke_computes_as_before(worker: Engine) -> None:
    before = await worker.rescore(PROBE)
    assert not await worker.is_asleep()
    for _ in range(2):  # a second call changes nothing
        await worker.sleep()
        assert await worker.is_asleep()
        assert await worker.version() == 0, "the version that it will serve"
        assert await worker.scheduler_answers(IDLE_SECONDS), "its launcher does not take it for dead"
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
