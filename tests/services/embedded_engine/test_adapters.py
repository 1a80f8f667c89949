"""LoRA adapters beside the weights: what PEFT computes, for the sequences that ask for it, exchanged between tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.embedded_engine.adapters import pack_adapter, read_adapter
from services.embedded_engine.app import create_app
from services.embedded_engine.loading import load
from services.embedded_engine.scheduler import Request
from services.embedded_engine.weights import WeightsError
from services.weights.policy_store import ADAPTER_NAME, CONFIG_FILE, WEIGHTS_FILE
from tests.adapters import adapted_logprobs, save_adapter
from tests.services.conftest import Serving
from tests.services.embedded_engine.conftest import RunningEngine, settings_for
from tests.services.embedded_engine.test_engine import held
from tests.services.embedded_engine.test_model import CONFIGS
from tests.tolerance import both_types, engine_tolerance, logprob_tolerance
from tests.waiting import IDLE_SECONDS

CPU = torch.device("cpu")


def load_into(engine: RunningEngine, directory: Path | None) -> None:
    adapter = None if directory is None else read_adapter(directory, engine.loaded.model.architecture, CPU)
    engine.engine.change_adapter(adapter, ADAPTER_NAME).result(IDLE_SECONDS)


def sampled(request: Request) -> list[float]:
    """The logprobs that the engine gave for what it sampled."""
    return request.sequences[0].logprobs


def expected(model: Path, adapter: Path | None, request: Request) -> list[float]:
    ids = [*request.prompt_ids, *request.sequences[0].output_ids]
    return adapted_logprobs(model, adapter, ids)[len(request.prompt_ids) - 1 :]


@both_types
@pytest.mark.parametrize("family", [name for name in CONFIGS if not name.endswith("_moe")])
def test_an_adapter_computes_what_peft_computes(
    tmp_path: Path, tiny_model: Path, family: str, compute_type: str
) -> None:
    torch.manual_seed(3)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((tiny_model / name).read_bytes())
    adapter = save_adapter(model, tmp_path / "adapter", 1, size=0.1)
    loaded = load(settings_for(model, engine_dtype=compute_type))
    loaded.model.adapter = read_adapter(adapter, loaded.model.architecture, CPU)
    ids = [5, 77, 301, 9, 500, 42]
    with torch.inference_mode():
        hidden = loaded.model.prefill([ids, ids], None, [True, False])
        scores = loaded.model.logits(hidden).log_softmax(-1)
    for start, directory in ((0, adapter), (len(ids), None)):
        given = [float(scores[start + place - 1, ids[place]]) for place in range(1, len(ids))]
        wanted = adapted_logprobs(model, directory, ids)
        assert given == pytest.approx(wanted, abs=logprob_tolerance(compute_type))
    assert wanted != pytest.approx(adapted_logprobs(model, adapter, ids), abs=0.1)


def test_a_sequence_gets_the_same_results_whatever_adapter_others_ask_for(
    engine: RunningEngine, adapters: list[Path]
) -> None:
    load_into(engine, adapters[0])
    alone = engine.generate(use_adapter=True, sampling_seed=5, max_new_tokens=24)
    plain = engine.generate(sampling_seed=5, max_new_tokens=24)
    both = [engine.submit(use_adapter=use, sampling_seed=5, max_new_tokens=24) for use in (True, False, True)]
    together = [future.result(IDLE_SECONDS) for future in both]
    for request, reference in zip(together, (alone, plain, alone), strict=True):
        assert request.sequences[0].output_ids == reference.sequences[0].output_ids
        assert sampled(request) == sampled(reference)
    assert sampled(alone) != sampled(plain)


def test_a_conversation_is_continued_with_the_adapter_that_computed_it_only(
    engine: RunningEngine, adapters: list[Path]
) -> None:
    load_into(engine, adapters[0])
    turn = engine.generate(use_adapter=True, sampling_seed=5)
    following = [*turn.prompt_ids, *turn.sequences[0].output_ids, 3]
    plain, adapted = (engine.generate(following, use_adapter=use, sampling_seed=6) for use in (False, True))
    assert [request.sequences[0].cached_tokens for request in (plain, adapted)] == [0, len(following) - 2]
    load_into(engine, adapters[0])
    again = engine.generate(following, use_adapter=True, sampling_seed=6)
    assert again.sequences[0].cached_tokens == 0
    assert sampled(again) == sampled(adapted)


def test_an_adapter_is_exchanged_under_paused_requests_which_go_on_with_the_new_one(
    engine: RunningEngine, adapters: list[Path], tiny_model: Path
) -> None:
    load_into(engine, adapters[0])
    gate, pending = held(engine, tokens=5, use_adapter=True, max_new_tokens=200)
    paused = engine.engine.pause("retract")
    gate.released.set()
    paused.result(IDLE_SECONDS)
    load_into(engine, None)
    load_into(engine, adapters[1])
    engine.engine.change_version("8").result(IDLE_SECONDS)
    engine.engine.resume().result(IDLE_SECONDS)
    request = pending.result(IDLE_SECONDS)
    ((first, _), (second, change)) = request.sequences[0].versions
    assert (first, second) == ("0", "8")
    before, after = (expected(tiny_model, adapter, request) for adapter in adapters)
    assert sampled(request)[:change] == pytest.approx(before[:change], abs=engine_tolerance())
    assert sampled(request)[change:] == pytest.approx(after[change:], abs=engine_tolerance())


def test_requests_end_when_their_adapter_does_not_come_back(engine: RunningEngine, adapters: list[Path]) -> None:
    load_into(engine, adapters[0])
    engine.engine.pause("retract").result(IDLE_SECONDS)
    orphan, other = engine.submit(use_adapter=True), engine.submit()
    load_into(engine, None)
    engine.engine.resume().result(IDLE_SECONDS)
    reason = orphan.result(IDLE_SECONDS).sequences[0].finish
    assert reason == {"type": "abort", "message": "the LoRA adapter was unloaded"}
    finish = other.result(IDLE_SECONDS).sequences[0].finish
    assert finish is not None
    assert finish["type"] == "length"


def test_an_adapter_that_does_not_fit_is_refused(engine: RunningEngine, adapters: list[Path]) -> None:
    config = json.loads((adapters[0] / CONFIG_FILE).read_text())
    tensors = load_file(adapters[0] / WEIGHTS_FILE)
    name, first = next(iter(tensors.items()))
    without_b = {key: value for key, value in tensors.items() if key != next(n for n in tensors if "lora_B" in n)}
    for changed_config, changed, reason in [
        (config, {}, "there are no tensors"),
        (config, without_b, "lora_B.weight is missing"),
        (config | {"r": 3}, tensors, "instead of"),
        (config | {"use_dora": True}, tensors, "plain LoRA only"),
        ({key: value for key, value in config.items() if key != "r"}, tensors, "adapter_config.json is not LoRA's"),
        (config, tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(4)}, "adapts"),
        (config, tensors | {name: torch.full_like(first, torch.nan)}, "not finite"),
    ]:
        with pytest.raises(WeightsError, match=reason):
            pack_adapter(changed_config, changed, engine.loaded.model.architecture, CPU, "the adapter")


async def test_refusals_change_nothing(
    serving: Serving, tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    load_first = {"lora_name": "policy", "lora_path": str(adapters[0])}
    async with serving(create_app(settings_for(tiny_model))) as http:
        for route, body, reason in (
            ("load_lora_adapter", {**load_first, "lora_path": str(tmp_path)}, "no LoRA adapter that can be read"),
            ("unload_lora_adapter", {"lora_name": "policy"}, "policy does not exist"),
        ):
            reply = await http.post(f"/{route}", json=body)
            assert reply.status_code == 400
            assert reason in reply.json()["message"]
            assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == [str(tiny_model)]
        assert (await http.post("/load_lora_adapter", json=load_first)).status_code == 200
        again = await http.post("/load_lora_adapter", json={**load_first, "lora_path": str(adapters[1])})
        assert again.status_code == 400
        models = (await http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["root"]) for m in models[1:]] == [("policy", str(adapters[0]))]
