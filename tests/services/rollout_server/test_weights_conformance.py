"""Pauses and weight changes: the same tests against the embedded engine and the real SGLang."""

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
from transformers import AutoModelForCausalLM

from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import DependencyLostError
from services.engines.engine import WorkerRefusedError
from services.engines.sglang import SGLang
from services.protocol.rewards import FinishReason
from services.weights.broadcast_group import join_weights_group, leave_weights_group, send_buckets
from tests.ports import free_ports
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


@pytest.fixture
async def worker(server: Nodes) -> AsyncIterator[SGLang]:
    """The server's worker, which serves version 0 again afterwards."""
    async with server.admin() as control:
        yield control
        await control.load_model(server.model, 0)
        await control.resume()


def client(server: Nodes) -> RolloutClient:
    return RolloutClient(server.router, TOKEN, vocab_size=17, deadline_seconds=IDLE_SECONDS)


def logprobs(model: Path, ids: list[int]) -> list[float]:
    """Of ``ids[1:]``, as transformers computes them."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        scores = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return [float(scores[place - 1, ids[place]]) for place in range(1, len(ids))]


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


async def test_weights_from_disk_change_what_is_served(server: Nodes, worker: SGLang, other_model: Path) -> None:
    ids = [*PROMPT, 9, 1]
    assert await worker.rescore(ids) == pytest.approx(logprobs(server.model, ids), abs=engine_tolerance())
    await worker.load_model(other_model, 7)
    assert await worker.version() == 7
    assert await worker.rescore(ids) == pytest.approx(logprobs(other_model, ids), abs=engine_tolerance())
    async with client(server) as rollouts:
        completions = await rollouts.generate(PROMPT, SamplingParams(max_new_tokens=4), n=4)
    for completion in completions:
        assert {*completion.policy_versions.tolist()} == {7}
        given = logprobs(other_model, [*PROMPT, *completion.completion_ids.tolist()])[len(PROMPT) - 1 :]
        assert completion.logprobs == pytest.approx(given, abs=engine_tolerance())


async def test_a_directory_that_is_not_there_changes_nothing(server: Nodes, worker: SGLang, tmp_path: Path) -> None:
    with pytest.raises(WorkerRefusedError, match="400"):
        await worker.load_model(tmp_path / "nothing", 8)
    assert await worker.version() == 0
    ids = [*PROMPT, 9, 1]
    assert await worker.rescore(ids) == pytest.approx(logprobs(server.model, ids), abs=engine_tolerance())


async def test_weights_of_other_shapes_are_never_served(server: Nodes, worker: SGLang, tmp_path: Path) -> None:
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
    ids = [*PROMPT, 9, 1]
    assert await worker.rescore(ids) == pytest.approx(logprobs(server.model, ids), abs=engine_tolerance())


async def test_a_request_in_flight_goes_on_with_new_weights_and_tells_which_made_what(
    server: Nodes, worker: SGLang, flight: Flight, other_model: Path
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
        old = logprobs(server.model, ids)[len(PROMPT) - 1 :]
        assert sequence.logprobs[:first].tolist() == pytest.approx(old, abs=engine_tolerance())


async def mixed_versions(server: Nodes, worker: SGLang, flight: Flight, other_model: Path) -> list[dict[str, Any]]:
    """Completions during which the weights changed; a pause may come before they begin, or when they are over."""
    for attempt in range(TRIES):
        pending = flight.start()
        await asyncio.sleep(0.02 * (1 + attempt) ** 2)
        await worker.pause("in_place")
        try:
            request = {"model_path": str(other_model), "weight_version": "11", "flush_cache": False}
            async with httpx.AsyncClient(headers=authorization(), trust_env=False, timeout=IDLE_SECONDS) as http:
                (await http.post(f"{worker.url}/update_weights_from_disk", json=request)).raise_for_status()
        finally:
            await worker.resume()
        replies = await pending
        if all(len(reply["meta_info"]["weight_versions"]) == 2 for reply in replies):
            return replies
        await worker.load_model(server.model, 0)
    return []


async def test_requests_in_flight_end_before_a_worker_is_held(
    server: Nodes, worker: SGLang, flight: Flight, other_model: Path
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
        wanted = logprobs(model, [*PROMPT, *reply["output_ids"]])[len(PROMPT) - 1 :]
        assert [p[0] for p in reply["meta_info"]["output_token_logprobs"]] == pytest.approx(
            wanted, abs=engine_tolerance()
        )
    assert await worker.version() == 12


async def test_what_is_paused_in_place_is_aborted_after_a_retraction(worker: SGLang, flight: Flight) -> None:
    """As launchers do it: whatever state a trainer has left a worker in, it can be brought up to date."""
    pending = flight.start()
    await asyncio.sleep(0.05)
    await worker.pause("in_place")
    await worker.pause("retract")
    await worker.pause("abort")
    for reply in await pending:
        assert reply["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    await worker.resume()


async def test_an_update_without_tensors_changes_nothing(server: Nodes, worker: SGLang) -> None:
    await worker.drain()
    assert await worker.version() == 0
    ids = [*PROMPT, 9, 1]
    assert await worker.rescore(ids) == pytest.approx(logprobs(server.model, ids), abs=engine_tolerance())


async def test_an_end_without_a_begin_is_refused(worker: SGLang) -> None:
    with pytest.raises(WorkerRefusedError, match="400"):
        await worker.end_update()


async def test_a_pause_that_aborts_gives_back_what_there_is(worker: SGLang, flight: Flight) -> None:
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


async def test_a_retracted_request_is_whole_in_the_end(server: Nodes, worker: SGLang, flight: Flight) -> None:
    pending = flight.start()
    await asyncio.sleep(0.05)
    await worker.pause("retract")
    await worker.resume()
    for reply in await pending:
        assert len(reply["output_ids"]) == 240
        ids = [*PROMPT, *reply["output_ids"]]
        wanted = logprobs(server.model, ids)[len(PROMPT) - 1 :]
        assert [p[0] for p in reply["meta_info"]["output_token_logprobs"]] == pytest.approx(
            wanted, abs=engine_tolerance()
        )


async def test_the_client_asks_again_for_what_was_aborted(server: Nodes, worker: SGLang) -> None:
    async with client(server) as rollouts:
        pending = asyncio.create_task(rollouts.generate(PROMPT, LONG, n=4))
        await asyncio.sleep(0.05)
        await worker.pause("abort")
        await worker.resume()
        completions = await pending
    assert len(completions) == 4
    assert all(completion.finish_reason is not FinishReason.ABORT for completion in completions)


def test_the_cache_is_flushed_when_nothing_runs(server: Nodes) -> None:
    assert server.post(server.worker(), "/flush_cache", {}).status_code == 200


async def test_resuming_what_is_not_paused_is_no_error(worker: SGLang) -> None:
    await worker.resume()


async def test_weights_come_by_broadcast(server: Nodes, worker: SGLang, other_model: Path) -> None:
    weights = load_file(other_model / "model.safetensors")
    (port,) = free_ports(1)
    name = f"weights-{port}"

    def join() -> Any:
        return join_weights_group("127.0.0.1", port, 0, 2, name, "gloo", IDLE_SECONDS)

    def send(names: list[str]) -> None:
        send_buckets([[weights[name].contiguous() for name in names]], torch.device("cpu"), group, IDLE_SECONDS)

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
        ids = [*PROMPT, 9, 1]
        assert await worker.rescore(ids) == pytest.approx(logprobs(other_model, ids), abs=engine_tolerance())
    finally:
        await worker.leave_group(name)
        leave_weights_group(group)


async def test_tensors_without_an_open_update_are_refused(worker: SGLang) -> None:
    with pytest.raises(WorkerRefusedError, match="400"):
        await worker.receive_weights(["model.norm.weight"], ["float32"], [[96]], "no-such-group", 14)
    assert await worker.version() == 0
