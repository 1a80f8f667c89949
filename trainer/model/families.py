"""Families of models that were tried, of which `docs/models.md` is the table. Others train in rows, untried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from services.core.errors import ConfigurationError

_JOB = "whole runs"
_KILLED = f"{_JOB}, one killed"
_ON_SGLANG = f"{_KILLED}; steps with SGLang"
_DELTA = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_WINDOW = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
_CONVOLUTIONS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
_WINDOWS = "full attention and windows"
BY_TRANSFORMERS = "transformers'"
_XML, _HERMES, _NONE = "XML", "Hermes", "none known"


class Family(NamedTuple):
    """A family as transformers names it in ``model_type``."""

    models: str
    """The models that people know it by."""
    kind: str
    """The ``model_type`` of its language model."""
    layers: str = "full attention"
    calls: str = _NONE
    """The form of its calls of tools; see services/chat/answers.py."""
    ran: str = _KILLED
    """The runs and comparisons that were seen to work."""
    has_adapters: bool = True
    """True if LoRA trains it, because its layers are single linear layers."""
    sglang: str = "its own"
    """The implementation by which SGLang 0.5.23 serves it."""
    sglang_lora: bool = True
    """True if SGLang 0.5.23 computes with every adapter that LoRA trains."""
    options: Mapping[str, Any] = {}
    """Fields of its configuration in which its models differ from transformers' defaults."""


FAMILIES = (
    Family("Llama 2, 3", "llama", calls=_HERMES),
    Family("Mistral, Ministral 8B", "mistral", options={"sliding_window": None}),
    Family("Ministral (windows)", "ministral", _WINDOWS, sglang=BY_TRANSFORMERS, sglang_lora=False, options=_WINDOW),
    Family("Qwen2, 2.5", "qwen2", calls=_HERMES),
    Family("Qwen3", "qwen3", calls=_HERMES),
    Family("Qwen3 MoE", "qwen3_moe", "full attention; experts", _HERMES, has_adapters=False),
    Family("Qwen3-Next", "qwen3_next", "gated delta net; experts", _HERMES, has_adapters=False, options=_DELTA),
    Family("Qwen3.5, 3.6, 3.8", "qwen3_5_text", "gated delta net", _XML, sglang_lora=False, options=_DELTA),
    Family(
        *("Qwen3.5 MoE and later", "qwen3_5_moe_text", "gated delta net; experts", _XML),
        has_adapters=False,
        options=_DELTA,
    ),
    Family("Gemma 1", "gemma"),
    Family("Gemma 2", "gemma2", f"{_WINDOWS}; caps", options=_WINDOW),
    Family("Gemma 3", "gemma3_text", _WINDOWS, options=_WINDOW),
    Family(
        *("Gemma 4", "gemma4_text", _WINDOWS, "Gemma 4"),
        sglang="its own, of image checkpoints",
        sglang_lora=False,
        options=_WINDOW,
    ),
    Family("gpt-oss", "gpt_oss", f"{_WINDOWS}; sinks; experts", "harmony", has_adapters=False, options=_WINDOW),
    Family("OLMo 1, 2", "olmo2"),
    Family("OLMo 3", "olmo3", _WINDOWS, ran=_ON_SGLANG, options=_WINDOW),
    Family("EXAONE 4", "exaone4", _WINDOWS, options=_WINDOW),
    Family("LFM2", "lfm2", "short convolutions", ran=_ON_SGLANG, sglang_lora=False, options=_CONVOLUTIONS),
    Family("Granite 3", "granite"),
    Family("Granite 4", "granitemoehybrid", "Mamba-2", has_adapters=False),
    Family("Command R", "cohere"),
    Family("Command R7B, A", "cohere2", _WINDOWS, options=_WINDOW),
    Family("SmolLM3", "smollm3", calls=_HERMES, sglang=BY_TRANSFORMERS, sglang_lora=False),
    Family("SmolLM2", "llama", calls=_HERMES, ran=f"{_JOB}: the demo"),
    Family("Phi 1, 2", "phi", sglang_lora=False),
    Family("Phi 3, 4", "phi3"),
    Family("GLM 4", "glm4"),
    Family("Seed-OSS", "seed_oss", sglang=BY_TRANSFORMERS, sglang_lora=False),
    Family("StarCoder 2", "starcoder2", sglang_lora=False),
    Family("GPT-2", "gpt2", has_adapters=False),
)


def check_sglang_lora(kind: str | None, lora_rank: int) -> bool:
    """Return whether SGLang computes with adapters of a ``model_type``; False if nobody has tried.

    Raises:
        ConfigurationError: it does not.
    """
    computes = [family.sglang_lora for family in FAMILIES if family.kind == kind]
    if not all(computes):
        raise ConfigurationError(
            f"LORA_RANK is {lora_rank}, but SGLang does not load adapters of model type {kind!r} (docs/models.md); "
            "unset LORA_RANK, or set ROLLOUT_ENGINE=embedded"
        )
    return bool(computes)
