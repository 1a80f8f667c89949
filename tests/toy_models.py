"""Tokenizers and models with random weights for single tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast


def noisy_model(config: PretrainedConfig, seed: int = 0, *, matrices: float, vectors: float) -> Any:
    """Return a random model to which noise was added, so that models differ more than freshly initialised ones do.

    ``matrices`` and ``vectors``, such as norms and biases, are the deviations of the noise.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (vectors if parameter.dim() == 1 else matrices))
    return model


def byte_tokenizer(specials: Sequence[str], chat_template: str | None = None, **names: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, whose vocabulary begins with ``specials``.

    ``names`` are keyword arguments of transformers, such as ``eos_token="</s>"``. A ``bos_token`` begins each text.
    """
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if (begin := names.get("bos_token")) is not None:
        special = [(begin, vocabulary[begin])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(specials), **names)
    fast.chat_template = chat_template
    return fast
