"""The names under which a model's parameters lie in its checkpoint, which are also the names that engines load.

transformers keeps some parameters otherwise than checkpoints do. For example it fuses the experts of a layer into
``mlp.experts.gate_up_proj``, where the checkpoint has ``mlp.experts.0.gate_proj.weight`` and so on. An engine skips
names that it does not know without an error, so that it would go on with old weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    cached_file,
)

from services.core.errors import ConfigurationError
from services.core.logs import get_logger

log = get_logger(__name__)

ROTARY = r"rotary_emb\.inv_freq$"
"""Tables in old checkpoints, which every program computes for itself."""

SHOWN = 5
"""Most names of each kind in a message."""


def in_checkpoint(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole parameters as the model's checkpoint has them, by transformers' own conversion in reverse.

    Args:
        model: the model, as ``from_pretrained`` made it.
        parameters: some of its parameters by name, with all those that lie in one tensor of the checkpoint.
    """
    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(parameters))
    return converted


def check_names(model: PreTrainedModel, model_name: str, *, has_adapters: bool) -> None:
    """Compare the names that would be published with those of the checkpoint that the model was loaded from.

    A checkpoint without an index or safetensors header is not compared.

    Args:
        model: the model as loaded, before it gets adapters.
        model_name: MODEL_NAME.
        has_adapters: the run trains LoRA adapters, which have the names of the parameters that they adapt.

    Raises:
        ConfigurationError: names are missing or surplus, or engines could not load the adapters.
    """
    if not getattr(model, "_weight_conversions", None):
        # Nothing was converted; but engines load the family's usual names, even if transformers also loads its own.
        usual = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [change for change in usual if not isinstance(change, PrefixChange)]
    with torch.no_grad():
        published = set(in_checkpoint(model, {name: p.to("meta") for name, p in model.named_parameters()}))
    if has_adapters and (fused := sorted(dict(model.named_parameters()).keys() - published)):
        raise ConfigurationError(
            f"LORA_RANK: {model.config.model_type} keeps several tensors of its checkpoint in one parameter "
            f"({_listed('such as', fused)}), and engines load no adapters of those; train it with LORA_RANK=0"
        )
    there = _names_in_files(model_name)
    if there is None:
        log.warning("the names of the checkpoint's tensors cannot be read and compared", model=model_name)
        return
    tied = _tied(model)  # They may lie in the files once or twice.
    ignored = [re.compile(pattern) for pattern in (ROTARY, *(model._keys_to_ignore_on_load_unexpected or ()))]
    missing = [name for name in sorted(there - published - tied) if not any(found.search(name) for found in ignored)]
    surplus = sorted(published - there - tied)
    if missing or surplus:
        raise ConfigurationError(
            f"MODEL_NAME: the tensors of {model_name} have other names than the trainer would publish, and engines "
            f"would silently keep old weights: {_listed('missing from what would be published', missing)}; "
            f"{_listed('not in the checkpoint', surplus)}. Choose a checkpoint in the format of its family"
        )


def _tied(model: PreTrainedModel) -> set[str]:
    """Return the names of parameters that share their data with another one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for alike in names.values() if len(alike) > 1 for name in alike}


def _names_in_files(model_name: str) -> set[str] | None:
    for file in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        path = cached_file(
            model_name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            continue
        if file == SAFE_WEIGHTS_NAME:
            with safe_open(path, framework="pt") as opened:
                return set(opened.keys())
        return set(json.loads(Path(path).read_text())["weight_map"])
    return None


def _listed(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{kind}: {', '.join(names[:SHOWN]) or 'none'}{more}"
