"""The rollout tier of the conformance tests: the same tests run against the embedded engine and the real SGLang."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.engines.engine import Engine
from services.weights.policy_store import ADAPTER_NAME
from tests.adapters import RANK
from tests.services.rollout_server.nodes import SGLANG_PYTHON, Nodes
from tests.tolerance import engine_tolerance

ENGINES = ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)]
PROBE = [5, 12, 6, 14, 9, 1]


def check_installed(engine: str) -> None:
    if engine == "sglang" and not SGLANG_PYTHON.exists():
        pytest.fail(f"{SGLANG_PYTHON} does not exist; `make test-sglang` installs it")


@pytest.fixture(scope="session", params=ENGINES)
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """One rollout node: a router in front of one engine that serves the tiny model, and adapters for it."""
    check_installed(request.param)
    # A worker that a test leaves behind with an old version is not to be looked after.
    environment = {"SERVICE_DEADLINE_SECONDS": "5000", "LORA_RANK": str(RANK)}
    nodes = Nodes(tmp_path_factory.mktemp("server"), tiny_model, engine=request.param, environment=environment)
    try:
        yield nodes.start_all()
    finally:
        nodes.stop()


def state_of(server: Nodes) -> dict[str, Any]:
    """What a test finds and must leave: the routing, and the worker's version, adapters, requests and caches."""
    models = server.get(server.worker(), "/v1/models").json()["data"]
    state = {"workers": server.registered(), "version": server.version(), "models": [model["id"] for model in models]}
    flushed = server.post(server.worker(), "/flush_cache", {})
    state["flushed"] = flushed.status_code  # 400 while requests run, or wait in a pause
    if server.engine == "embedded":
        stats = server.get(server.worker(), "/stats").json()
        state |= {name: stats[name] for name in ("running", "waiting", "paused", "prefix_cache_tokens")}
    return state


def scores(server: Nodes, ids: list[int]) -> list[float]:
    """The worker's log-probabilities of ``ids[1:]``, which tell its weights."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    reply = server.post(server.worker(), "/generate", body).json()
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


@pytest.fixture(scope="session")
def at_first(server: Nodes) -> tuple[dict[str, Any], list[float]]:
    """The state of the server before the first test."""
    return state_of(server), scores(server, PROBE)


@pytest.fixture(autouse=True)
def left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves the server in another state than it found."""
    if "server" not in request.fixturenames:
        yield
        return
    server = request.getfixturevalue("server")
    state, logprobs = request.getfixturevalue("at_first")
    yield
    assert state_of(server) == state
    assert scores(server, PROBE) == pytest.approx(logprobs, abs=engine_tolerance())


@pytest.fixture
async def worker(server: Nodes) -> AsyncIterator[Engine]:
    """The server's worker, which is awake, has no adapter and serves version 0 again afterwards."""
    async with server.admin() as control:
        yield control
        await control.hold("abort")
        if await control.adapter_path() is not None:
            await control._ask("POST", "/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        await control.load_model(server.model, 0)
        await control.resume()


def logprobs_by(
    model: Any, ids: Sequence[int], first: int = 1, temperature: float = 1.0, tolerance: float | None = None
) -> Any:
    """Log-probabilities of ``ids[first:]`` as transformers computes them, for a comparison with an engine's.

    ``model`` is a model of transformers, or its directory.
    """
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = (model(torch.tensor([list(ids)])).logits[0].float() / temperature).log_softmax(-1)
    wanted = [float(found[place - 1, ids[place]]) for place in range(first, len(ids))]
    return pytest.approx(wanted, abs=tolerance or engine_tolerance())
