"""The numbers of a model that decide over memory, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and numbers of parameters of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; in a mixture, the sum over the experts that compute a token."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    token_experts: int
    """Experts that compute a token; 0 without a mixture of experts."""
    has_head_norms: bool
    """True when queries and keys are normalised, as in Qwen3."""
    parameters: int
    """All parameters; tied ones count once."""
    layer_parameters: int
    """Parameters of the largest layer; in most models all are equal."""
    root_parameters: int
    """Parameters outside the layers, which FSDP gathers once: embedding, last norm, head."""
    adapter_rank_parameters: int
    """Parameters of LoRA adapters of rank 1 on every linear layer but the output head."""
    is_bfloat16: bool
    """True when the checkpoint has bfloat16 numbers, by its configuration."""
    teachers: tuple[ModelShape, ...] = ()
    """Frozen models that a run keeps beside this one, which it trains."""

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, which may be tied to the embedding."""
        return self.vocabulary * self.hidden

    def has_heads_for(self, ranks: int) -> bool:
        """Return whether attention can be computed by so many ranks, equally many heads on each."""
        return self.heads % ranks == 0 and 0 in (self.kv_heads % ranks, ranks % self.kv_heads)

    @classmethod
    def of(cls, config: PretrainedConfig, *, trust_remote_code: bool = False) -> ModelShape:
        """Return the shape of a configuration's model, which is built without data."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        decoder = model.base_model
        layer = decoder.layers[-1]
        heads = config.num_attention_heads
        experts = getattr(config, "num_experts_per_tok", None) or getattr(config, "num_experts_per_token", None)
        linear = [part for part in decoder.modules() if isinstance(part, nn.Linear)]
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=experts * config.moe_intermediate_size
            if experts and hasattr(config, "moe_intermediate_size")
            else config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            token_experts=experts or 0,
            has_head_norms=hasattr(getattr(layer, "self_attn", None), "q_norm"),
            parameters=count(model),
            layer_parameters=max(map(count, decoder.layers)),
            root_parameters=count(model) - sum(map(count, decoder.layers)),
            adapter_rank_parameters=sum(part.in_features + part.out_features for part in linear),
            is_bfloat16=config.dtype == torch.bfloat16,
        )


def count(module: nn.Module) -> int:
    """Return the number of a module's parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())
