"""Model directories and adapter directories, as transformers, PEFT and every engine load them."""

from __future__ import annotations

import copy
import json
import logging
import stat
from functools import partial
from pathlib import Path

import huggingface_hub.serialization._torch
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from services.weights.policy_store import CONFIG_FILE, WEIGHTS_FILE
from trainer.checkpoints.volume import DiskFullError, write_whole, writing
from trainer.model.gathering import gather_state
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding

# huggingface_hub logs every file that it saves, under its own path as the logger's name.
logging.getLogger(huggingface_hub.serialization._torch.__file__).setLevel(logging.WARNING)


def save_pretrained(policy: Policy, ranks: Ranks, directory: Path, rounding: Rounding) -> None:
    """Write a model directory that ``AutoModelForCausalLM.from_pretrained`` and every engine load. A collective.

    Raises:
        DiskFullError: the disk is full; raised on every rank.
    """
    # No copy on a CPU: everything is written before the parameters change.
    state = gather_state(policy.full_parameters(rounding), ranks, copy=False)
    write = partial(write_model, policy, state, dtype=rounding.dtype)
    ranks.on_main(lambda: write_whole(directory, write), DiskFullError)


def write_model(policy: Policy, state: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    """Write a model directory: weights, configuration, generation defaults and tokenizer. For rank 0.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, directory, metadata={"format": "pt"})
        _save_description(policy, directory, dtype)
        follow_umask(directory, "config.json")


def write_adapter(policy: Policy, state: dict[str, Tensor], directory: Path) -> None:
    """Write a directory with the LoRA adapters, which PEFT and every engine load beside MODEL_NAME. For rank 0.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(json.dumps(policy.adapter_config(), indent=2))
        follow_umask(directory, CONFIG_FILE)


def follow_umask(directory: Path, config_file: str) -> None:
    """Give the weights the mode of the file of their configuration: safetensors lets only their owner read them."""
    mode = stat.S_IMODE((directory / config_file).stat().st_mode)
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)


def _save_description(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    assert policy.description is not None, "only rank 0 saves, and only the policy in training"
    config = copy.deepcopy(policy.description.config)
    config.dtype = dtype
    config.architectures = [type(policy.causal_lm()).__name__]
    config.save_pretrained(directory)
    generation = getattr(policy.causal_lm(), "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    policy.description.tokenizer.save_pretrained(directory)
