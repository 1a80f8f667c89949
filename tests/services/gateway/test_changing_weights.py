"""Weights that change in the middle of episodes: every token has the version and log-probability it was sampled by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.protocol.sessions import CreateSessionRequest, Trace, TraceSequence
from tests.services.conftest import RunningService
from tests.waiting import IDLE_SECONDS

pytestmark = pytest.mark.slow
TEMPERATURE = 5.0
"""The answers of the tiny model are longer the hotter it is."""
AGENTS = 6
TURNS = 4
WEIGHTS = 3
"""Models that take turns: version v has the weights of model v modulo WEIGHTS."""
PAUSES = ("in_place", "retract", "")
"""The mode of the engine's pause while weights change; "": it ends what it has begun."""
MOST_VERSIONS = 300


@pytest.fixture(scope="module")
def directories(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The tiny model and relatives of it, with the same tokenizer."""
    made = [tiny_model]
    torch.manual_seed(3)
    for number in range(1, WEIGHTS):
        model = load(tiny_model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        made.append(tmp_path_factory.mktemp(f"weights-{number}"))
        model.save_pretrained(made[-1])
    return made


def load(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


async def play(http: httpx.AsyncClient, client: GatewayClient, name: str, traces: list[Trace]) -> None:
    """Play an episode of some turns."""
    await client.create(
        CreateSessionRequest(id=name, seed=len(name), temperature=TEMPERATURE, max_turn_tokens=30, deadline_seconds=999)
    )
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn}+{len(traces) % 10}="})
        reply = await http.post(f"{client.agent_url(name)}/chat/completions", json={"messages": messages})
        messages.append(reply.raise_for_status().json()["choices"][0]["message"])
    traces.append(await client.finish(name, 1.0))


async def change_weights(http: httpx.AsyncClient, engine: str, version: int, pause: str, model: Path) -> bool:
    """Let the engine serve ``model``; return whether that was in mid-turn."""

    async def post(path: str, **body: Any) -> str:
        reply = await http.post(f"{engine}{path}", json=body)
        return str(reply.raise_for_status().json()["message"])

    paused = await post("/pause_generation", mode=pause) if pause else ""
    keeps = pause == "in_place"
    await post("/update_weights_from_disk", model_path=str(model), weight_version=str(version), flush_cache=not keeps)
    if pause:
        await post("/continue_generation")
    return paused not in ("", "paused 0 sequences")


async def test_every_token_has_the_version_and_the_log_probability_it_was_sampled_by(
    start_service: Any, directories: list[Path]
) -> None:
    engine: RunningService = start_service("services.embedded_engine", MODEL_NAME=str(directories[0]))
    mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}", "gateway-0:8005": "127.0.0.1:0"}
    environment = {"MODEL_NAME": str(directories[0]), ENDPOINTS_VARIABLE: json.dumps(mapping)}
    gateway: RunningService = start_service("services.gateway", **environment)
    traces: list[Trace] = []
    caught: dict[str, int] = dict.fromkeys(PAUSES[:2], 0)
    pauses: dict[int, str] = {0: ""}
    over = asyncio.Event()

    async def agent(number: int) -> None:
        episode = 0
        while not over.is_set():
            await play(http, client, f"{number}-{episode}", traces)
            episode += 1

    async with (
        GatewayClient(Endpoint("127.0.0.1", gateway.port)) as client,
        httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as http,
        asyncio.TaskGroup() as agents,
    ):
        for number in range(AGENTS):
            agents.create_task(agent(number))
        for version in range(1, MOST_VERSIONS):
            pauses[version] = pause = PAUSES[version % len(PAUSES)]
            if await change_weights(http, engine.url, version, pause, directories[version % WEIGHTS]):
                caught[pause] += 1
            if min(caught.values()) >= 2:
                break
            await asyncio.sleep(0.02 * (version % 4))
        over.set()
    assert min(caught.values()) >= 2, caught
    models = [load(directory) for directory in directories]
    turns = [turn for trace in traces for sequence in trace.sequences for turn in turns_of(sequence)]
    with torch.inference_mode():
        deviations = [check(models, pauses, *turn) for turn in turns]
    assert max(right for right, _ in deviations) < 1e-4
    # Under the weights of another version they are others, so that a wrong span would show.
    assert min(wrong for _, wrong in deviations) > 1e-3
    changed = [versions for *_, versions in turns if len(set(versions)) > 1]
    assert {pauses[later] for versions in changed for one, later in pairwise(versions) if one != later} == {
        "in_place",
        "retract",
    }


def turns_of(sequence: TraceSequence) -> Iterator[tuple[list[int], list[int], list[float], list[int]]]:
    """Yield the tokens before each turn, its own, their log-probabilities and their versions."""
    versions = sequence.policy_versions.tolist()
    assert len(versions) == len(sequence.completion_ids)
    place = 0
    for is_sampled, run in groupby(sequence.mask.tolist()):
        end = place + len(list(run))
        if is_sampled:
            before = sequence.prompt_ids + sequence.completion_ids[:place].tolist()
            here = slice(place, end)
            yield before, sequence.completion_ids[here].tolist(), sequence.logprobs[here].tolist(), versions[here]
        place = end


def check(
    models: list[PreTrainedModel],
    pauses: dict[int, str],
    before: list[int],
    ids: list[int],
    logprobs: list[float],
    versions: list[int],
) -> tuple[float, float]:
    """Return the largest deviation of the log-probabilities under their own versions, and under the next ones."""
    return tuple(  # type: ignore[return-value]
        max(abs(a - b) for a, b in zip(logprobs, computed(models, pauses, before, ids, versions, other), strict=True))
        for other in (0, 1)
    )


def computed(
    models: list[PreTrainedModel],
    pauses: dict[int, str],
    before: list[int],
    ids: list[int],
    versions: list[int],
    other: int,
) -> list[float]:
    """Return the log-probabilities as an engine computes them; ``other`` is added to the models' numbers.

    Weights that change in place go on with the keys and values of the weights before them; otherwise all are anew.
    """
    whole = before + ids
    found: list[float] = []
    cache, done, place = DynamicCache(), 0, len(before)
    for version, run in groupby(versions):
        end = place + len(list(run))
        if pauses[version] != "in_place":
            cache, done = DynamicCache(), 0
        model = models[(version + other) % WEIGHTS]
        logits = model(torch.tensor([whole[done : end - 1]]), past_key_values=cache, use_cache=True).logits[0]
        rows = (logits / TEMPERATURE).log_softmax(-1)[place - end :]
        found += [float(row[token]) for row, token in zip(rows, whole[place:end], strict=True)]
        done, place = end - 1, end
    return found
