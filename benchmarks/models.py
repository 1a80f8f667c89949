"""The models of the benchmarks: one is pretrained, the others get random weights."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import ROOT

SIZES = ("tiny", "135m", "0.5b")
PRETRAINED = ROOT / ".cache/models/smollm2-135m"

HALF_A_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The shape of Qwen2.5-0.5B."""


def directory(size: str, new: Path) -> Path:
    """Return the model directory of a size; a model other than the pretrained one is written to ``new``."""
    if size == "135m":
        return PRETRAINED
    if size == "tiny":
        from toys.arithmetic import make  # Here, because transformers takes seconds to import.

        make(new)
    else:
        from toys.arithmetic import build_tokenizer
        from toys.models import qwen2, random_model

        random_model(qwen2(**HALF_A_BILLION)).save_pretrained(new)
        build_tokenizer().save_pretrained(new)
    return new
