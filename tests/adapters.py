"""Random LoRA adapters, made and computed by PEFT, which the code under test does not use to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

RANK = 4


def save_adapter(model: Path, directory: Path, seed: int, size: float = 0.02) -> Path:
    """Write a random adapter of all linear layers."""
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(size * torch.randn_like(parameter))
    adapted.save_pretrained(directory)
    return directory


def adapted_logprobs(model: Path, adapter: Path | None, ids: list[int]) -> list[float]:
    """Return the log-probabilities of ``ids[1:]``, with an adapter or without."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        reference = PeftModel.from_pretrained(reference, adapter).eval()
    with torch.inference_mode():
        scores = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return [float(scores[place - 1, ids[place]]) for place in range(1, len(ids))]
