"""Which models the trainer computes exactly: decoders with softmax attention over the whole context and plain logits.

The trainer runs a model's layers with an attention of its own (attention.py) and computes log-probabilities from the
last hidden states and the output embedding (logprobs.py). A model which does more than that between the two would be
trained on wrong numbers, so it is refused.
"""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from services.core.errors import ConfigurationError

LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")
"""What configurations call a factor of the logits."""

SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
"""What configurations call tanh caps of attention scores or logits."""


def check_config(config: PretrainedConfig) -> None:
    """Refuses models by what their configuration says of attention and logits.

    Raises:
        ConfigurationError: sliding windows, recurrent layers, soft caps or scaled logits.
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
    """Refuses models by how they are built.

    Raises:
        ConfigurationError: attention of the model's own making, or an output embedding with a bias.
    """
    if not model._supports_attention_backend:
        raise _refusal(model.config, "has an attention of its own which cannot be replaced")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise _refusal(model.config, "adds a bias to its logits")


def _refusal(config: PretrainedConfig, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"MODEL_NAME: {config.model_type} {what}, which the trainer does not support; "
        "choose a model of another family (Qwen2, Qwen3, Llama, ...)"
    )
