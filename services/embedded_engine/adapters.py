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
from services.embedded_engine.weights import Architecture, WeightsError, check_finite, refuse
from services.weights.policy_store import CONFIG_FILE, WEIGHTS_FILE

_TENSOR = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(\w+\.\w+))\.lora_([AB])\.weight")
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
"""The adapter of a model, layer by layer."""


def adapted(linear: Linear, low_rank: LowRank | None, x: Tensor, rows: Tensor | None) -> Tensor:
    """Return ``linear(x)`` [N, out], plus the low-rank product in the ``rows`` [N, 1] (bool; None: in no row)."""
    y = linear(x)
    if low_rank is None or rows is None:
        return y
    return torch.where(rows, (y.float() + low_rank(x)).to(y.dtype), y)


def read_adapter(directory: Path, architecture: Architecture, device: torch.device) -> Adapter:
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
    architecture: Architecture,
    device: torch.device,
    source: str,
) -> Adapter:
    """Return an adapter, ready to compute with, made of PEFT's configuration and tensors.

    Raises:
        WeightsError: the adapter is not LoRA, does not fit the model, or is not finite.
    """
    scale = _scale(config, source)
    _check(tensors, architecture, int(config["r"]), source)
    check_finite(tensors, source)
    shapes = architecture.shapes()

    def low_rank(layer: int, projections: Sequence[str]) -> LowRank | None:
        downs, ups = [], []
        for name in projections:
            module = f"model.layers.{layer}.{name}"
            if f"{module}.weight" not in shapes:
                return None  # The layer is a mixture of experts, whose experts have no adapters.
            a, b = (tensors.get(f"base_model.model.{module}.lora_{side}.weight") for side in "AB")
            if a is not None and b is not None:
                downs.append(a.to(device, torch.float32))
                ups.append(b.to(device, torch.float32) * scale)
            else:
                ups.append(torch.zeros(shapes[f"{module}.weight"][0], 0, device=device))
        if not downs:
            return None
        # Projections of the same input are one product, so B is block-diagonal.
        return LowRank(make_linear(torch.cat(downs), None), make_linear(torch.block_diag(*ups), None))

    with torch.inference_mode():
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


def _check(tensors: Mapping[str, Tensor], architecture: Architecture, rank: int, source: str) -> None:
    """Compare names and shapes of an adapter's tensors with the model's projections."""
    shapes = architecture.shapes()
    adaptable = {projection for projections in _MERGED.values() for projection in projections}
    problems = [] if tensors else ["there are no tensors"]
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        weight = shapes.get(f"{match[1]}.weight") if match else None
        if match is None or weight is None or match[3] not in adaptable:
            problems.append(f"{name} adapts no projection of the model")
            continue
        expected = (rank, weight[1]) if match[4] == "A" else (weight[0], rank)
        if tuple(tensor.shape) != expected:
            problems.append(f"{name} is {list(tensor.shape)} instead of {list(expected)}")
        other = name.replace(f"lora_{match[4]}", "lora_B" if match[4] == "A" else "lora_A")
        if other not in tensors:
            problems.append(f"{other} is missing")
    refuse(source, problems)
