"""The embedded engine's transformer computes what transformers computes, row by row the same in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.embedded_engine.kv_cache import KVCache
from services.embedded_engine.model import Model
from services.embedded_engine.weights import Architecture, read_directory
from tests.tolerance import both_types, logprob_tolerance
from tests.toy_models import noisy_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 611,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases, untied, scaled rotation": LlamaConfig(
        **SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with random weights of the kind, norms and biases included."""
    model = noisy_model(CONFIGS[request.param], 3, matrices=0.05, vectors=0.2)
    path = tmp_path_factory.mktemp("random")
    model.save_pretrained(path)
    return path


def load_model(directory: Path, compute_type: str) -> Model:
    dtype = getattr(torch, compute_type)
    config = AutoConfig.from_pretrained(directory)
    with torch.inference_mode():
        return Model(config, read_directory(directory, Architecture(config)), dtype, CPU, 256)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(611, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill_rows(model: Model, cache: KVCache, prompts: list[list[int]]) -> None:
    """Computes prompts into rows 0, 1, ..."""

    def store(layer: int, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache.keys[layer][number, :, : keys.shape[1]] = keys
        cache.values[layer][number, :, : values.shape[1]] = values

    model.prefill(prompts, store)


@both_types
@torch.inference_mode()
def test_prefill_gives_transformers_logprobs(directory: Path, compute_type: str) -> None:
    model = load_model(directory, compute_type)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokens(70, 0)
    given = model.logits(model.prefill([ids], None)).log_softmax(-1)
    wanted = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert greatest(model, given - wanted) < logprob_tolerance(compute_type)


def greatest(model: Model, differences: torch.Tensor) -> float:
    """Return the greatest absolute difference in a median token, for mixtures in bfloat16; else in any token.

    In bfloat16, tokens whose experts are almost equally likely are computed by other experts.
    """
    largest = differences.abs().amax(-1)
    is_rounded = model.architecture.expert_layers and model.dtype is torch.bfloat16
    return float(largest.median() if is_rounded else largest.max())


@both_types
@torch.inference_mode()
def test_decoding_token_by_token_gives_transformers_logprobs(directory: Path, compute_type: str) -> None:
    model = load_model(directory, compute_type)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokens(100, 1)
    wanted = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    cache = KVCache(model.architecture, 1024, 4, model.dtype, CPU)
    cache.ensure(100, 0, 0)
    prefill_rows(model, cache, [ids[:20]])
    given = [
        model.decode(torch.tensor([ids[position]]), torch.tensor([position]), cache, position + 1)[0].log_softmax(-1)
        for position in range(20, 100)
    ]
    assert greatest(model, torch.stack(given) - wanted[20:]) < logprob_tolerance(compute_type)


@both_types
@torch.inference_mode()
def test_packed_prompts_are_computed_as_if_alone_to_the_bit(directory: Path, compute_type: str) -> None:
    model = load_model(directory, compute_type)
    prompts = [tokens(length, length) for length in (33, 1, 70, 7)]
    together = model.logits(model.prefill(prompts, None)).split([len(prompt) for prompt in prompts])
    for prompt, part in zip(prompts, together, strict=True):
        assert torch.equal(model.logits(model.prefill([prompt], None)), part)


@both_types
@torch.inference_mode()
def test_a_decoded_row_is_the_same_in_any_batch_to_the_bit(directory: Path, compute_type: str) -> None:
    model = load_model(directory, compute_type)
    prompts = [tokens(5 + 3 * row, row) for row in range(23)]

    def decode(rows: list[int], room: int) -> dict[int, torch.Tensor]:
        cache = KVCache(model.architecture, 16_384, 64, model.dtype, CPU)
        cache.ensure(room, 0, 0)
        prefill_rows(model, cache, [prompts[row][:-1] for row in rows])
        positions = torch.tensor([len(prompts[row]) - 1 for row in rows])
        newest = torch.tensor([prompts[row][-1] for row in rows])
        logits = model.decode(newest, positions, cache, int(positions.max()) + 1)
        return dict(zip(rows, logits, strict=True))

    wanted = decode(list(range(23)), 80)
    for rows, room in (([4], 64), ([22, 4], 80), ([3, 9, 4, 11, 0, 1, 2], 128), (list(range(22, -1, -1)), 200)):
        for row, logits in decode(rows, room).items():
            assert torch.equal(logits, wanted[row])


@torch.inference_mode()
def test_logits_of_bfloat16_weights_are_not_rounded(directory: Path) -> None:
    """The trainer does not round them either."""
    model = load_model(directory, "bfloat16")
    hidden = model.prefill([tokens(70, 0)], None)
    assert hidden.dtype is torch.bfloat16
    names = read_directory(directory, model.architecture)
    head = names["model.embed_tokens.weight" if model.architecture.has_tied_embeddings else "lm_head.weight"]
    wanted = hidden.double() @ head.bfloat16().double().T
    assert (model.logits(hidden).double() - wanted).abs().max() < 1e-4
