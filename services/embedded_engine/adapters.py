"""LoRA adapters, computed in addition to the weights that they adapt (Hu et al., arXiv:2106.09685).

A layer returns y = x W^T + b + s (x A^T) B^T with A [r, in], B [out, r] and s = lora_alpha / r. The low-rank product is
computed in float32 whatever the type of W, and W is never changed: a sum W + s B A, rounded to bfloat16, would lose a
trained change that is small compared with W.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from services.core.linear import Linear, make_linear
from services.embedded_engine.weights import Architecture, TensorNames, WeightsError, check_finite, refuse
from services.weights.policy_store import CONFIG_FILE, WEIGHTS_FILE

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MERGED = {
    "query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The projections of each of a layer's matrix products."""


class AdapterConfig(BaseModel):
    """The fields of PEFT's adapter_config.json that change the computation."""

    peft_type: str = "LORA"
    r: int = Field(ge=1)
    lora_alpha: float
    bias: str = "none"
    use_dora: bool = False
    use_rslora: bool = False


@dataclass(frozen=True)
class LowRank:
    """The product s (x A^T) B^T of one layer, in float32."""

    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, out] for x [N, in]."""
        return self.up(self.down(x.float()))


@dataclass(frozen=True)
class LayerAdapter:
    """The low-rank products of one decoder layer; None where the adapter has none."""

    query_key_value: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


Adapter = Sequence[LayerAdapter]
"""The adapter of a model of a known family, layer by layer."""
AnyAdapter = Adapter | Mapping[str, LowRank]
"""The same, or any other model's adapter: a product for each adapted layer by its name."""


def adapted(linear: Linear, low_rank: LowRank | None, x: Tensor, rows: Tensor | None) -> Tensor:
    """Return ``linear(x)`` [N, out], plus the low-rank product in the ``rows`` [N, 1] (bool; None: in no row)."""
    y = linear(x)
    if low_rank is None or rows is None:
        return y
    return torch.where(rows, (y.float() + low_rank(x)).to(y.dtype), y)


def read_adapter(directory: Path, architecture: TensorNames, device: torch.device) -> AnyAdapter:
    """Return the adapter in a directory as PEFT writes it.

    Raises:
        WeightsError: the directory cannot be read, or its adapter does not fit the model.
    """
    try:
        config = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"{directory} has no LoRA adapter that can be read: {error}") from error
    return pack_adapter(config, tensors, architecture, device, str(directory))


def pack_adapter(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    architecture: TensorNames,
    device: torch.device,
    source: str,
) -> AnyAdapter:
    """Return an adapter, ready to compute with, made of PEFT's configuration and tensors.

    That of a known family has a product for each of a layer's matrix products; any other's, one for each linear layer.

    Raises:
        WeightsError: the adapter is not LoRA, does not fit the model, or is not finite.
    """
    scale = _scale(config, source)
    factors = _checked(tensors, architecture, int(config["r"]), source)
    check_finite(tensors, source)
    with torch.inference_mode():
        pairs = {
            name: (one["A"].to(device, torch.float32), one["B"].to(device, torch.float32) * scale)
            for name, one in factors.items()
        }
        if isinstance(architecture, Architecture):
            return _merged(pairs, architecture, device)
        return {name: LowRank(make_linear(a, None), make_linear(b, None)) for name, (a, b) in pairs.items()}


def _merged(pairs: Mapping[str, tuple[Tensor, Tensor]], architecture: Architecture, device: torch.device) -> Adapter:
    """Return the adapter of a known family from A and s B of each adapted projection."""
    layers = architecture.linear_layers

    def low_rank(layer: int, projections: Sequence[str]) -> LowRank | None:
        downs, ups = [], []
        for name in projections:
            module = f"model.layers.{layer}.{name}"
            if module not in layers:
                return None  # The layer is a mixture of experts, whose experts have no adapters.
            if module in pairs:
                downs.append(pairs[module][0])
                ups.append(pairs[module][1])
            else:
                ups.append(torch.zeros(layers[module][0], 0, device=device))
        if not downs:
            return None
        # Projections of the same input are one product, so B is block-diagonal.
        return LowRank(make_linear(torch.cat(downs), None), make_linear(torch.block_diag(*ups), None))

    return [
        LayerAdapter(*(low_rank(layer, _MERGED[field.name]) for field in fields(LayerAdapter)))
        for layer in range(architecture.num_layers)
    ]


def _scale(config: Mapping[str, Any], source: str) -> float:
    try:
        read = AdapterConfig.model_validate(config)
    except ValidationError as error:
        raise WeightsError(f"{source}: its {CONFIG_FILE} is not LoRA's: {error.errors()[0]['msg']}") from error
    if read.peft_type != "LORA" or read.bias != "none" or read.use_dora or read.use_rslora:
        raise WeightsError(f"{source}: the embedded engine computes plain LoRA only (no DoRA, rsLoRA or biases)")
    return read.lora_alpha / read.r


def _checked(
    tensors: Mapping[str, Tensor], architecture: TensorNames, rank: int, source: str
) -> dict[str, dict[str, Tensor]]:
    """Return A and B of each adapted layer, after comparing their names and shapes with the model's layers."""
    layers = architecture.linear_layers
    factors: dict[str, dict[str, Tensor]] = {}
    problems = [] if tensors else ["there are no tensors"]
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        layer = architecture.own_name(match[1]) if match else ""
        if match is None or layer not in layers:
            problems.append(f"{name} adapts no projection of the model")
            continue
        outputs, inputs = layers[layer]
        expected = (rank, inputs) if match[2] == "A" else (outputs, rank)
        if tuple(tensor.shape) != expected:
            problems.append(f"{name} is {list(tensor.shape)} instead of {list(expected)}")
        other = name.replace(f"lora_{match[2]}", "lora_B" if match[2] == "A" else "lora_A")
        if other not in tensors:
            problems.append(f"{other} is missing")
        factors.setdefault(layer, {})[match[2]] = tensor
    refuse(source, problems)
    return factors
