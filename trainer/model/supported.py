"""The check for models that the trainer computes exactly: softmax attention over the whole context, plain logits.

The trainer runs a model's layers with its own attention (attention.py) and computes log-probabilities from the last
hidden states and the output embedding (logprobs.py). A model that computes more than this would be trained on wrong
numbers, so it is refused.
"""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from services.core.errors import ConfigurationError

FAMILIES = "Qwen2, Qwen3, Llama, ..."
"""Families of supported models, for messages."""

LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")
"""Names in configurations for a factor of the logits."""

SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
"""Names in configurations for tanh caps of attention scores or logits."""


def check_config(config: PretrainedConfig) -> None:
    """Refuse a model whose configuration asks for other attention or logits than the trainer computes.

    Raises:
        ConfigurationError: the model has sliding windows, recurrent layers, soft caps or scaled logits.
    """
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    if set(layer_types) != {"full_attention"}:
        raise _refusal(config, f"has layers of type {', '.join(sorted(set(layer_types) - {'full_attention'}))}")
    for name in SOFT_CAPS:
        if getattr(config, name, None) is not None:
            raise _refusal(config, f"caps attention scores or logits ({name})")
    for name in LOGIT_FACTORS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise _refusal(config, f"scales its logits ({name})")


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose attention cannot be replaced or whose logits have a bias.

    Raises:
        ConfigurationError: the model is one of these.
    """
    if not model._supports_attention_backend:
        raise _refusal(model.config, "computes attention in code that cannot be replaced")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise _refusal(model.config, "adds a bias to its logits")


def _refusal(config: PretrainedConfig, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"MODEL_NAME: {config.model_type} {what}, which the trainer does not support; "
        f"choose a model of another family ({FAMILIES})"
    )
