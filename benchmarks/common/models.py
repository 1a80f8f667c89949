"""The models of the benchmarks: one pretrained, the others made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.job import ROOT
from scripts.tiny_model import build_model, build_tokenizer, make

SIZES = ("tiny", "135m", "0.5b")
PRETRAINED = ROOT / ".cache/models/smollm2-135m"

# Those of Qwen2.5-0.5B.
HALF_A_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}


def directory(size: str, new: Path) -> Path:
    """The model directory of a size, made as ``new`` where it is not the pretrained one.

    Raises:
        SystemExit: there is no pretrained model.
    """
    if size == "135m":
        if not (PRETRAINED / "config.json").exists():
            raise SystemExit(f"error: no model in {PRETRAINED}; `make bench` and `make demo` put it there")
        return PRETRAINED
    if size == "tiny":
        make(new)
        return new
    return make_random(new, HALF_A_BILLION)


def make_random(new: Path, shape: dict[str, Any]) -> Path:
    """Writes a Qwen2 with random weights and the tiny model's tokenizer; ``shape`` differs from the tiny model's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = build_model().config.to_dict()
    # Made from the others, one a layer.
    del tiny["layer_types"]
    config = Qwen2Config(**(tiny | {"max_position_embeddings": 32_768} | shape))
    new.mkdir(parents=True, exist_ok=True)
    Qwen2ForCausalLM(config).save_pretrained(new)
    build_tokenizer().save_pretrained(new)
    return new
