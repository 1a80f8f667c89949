"""Linear layers whose results for a row do not depend on what else is in the batch.

A plain matrix product chooses its kernel by the number of rows, so that a token's log-probability would change in its
last bits with the load of the engine, and sometimes a sampled token with it. oneDNN's product with a packed weight adds
in one order for any number of rows from two on (a test shows it), and is the fastest on a CPU at any batch size. A row
alone is computed twice, because oneDNN may add up a single row in another order, which it does with AVX-512 and inputs
of more than 1,024 numbers. Where oneDNN packs no weights, rows are padded to a multiple of PAD_ROWS for the same
purpose.

With AMX, oneDNN adds bfloat16 numbers in an order that depends on the number of rows. So this module keeps oneDNN from
AMX in its process, unless the environment names instructions itself.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

# The most instructions without AMX; processors that have fewer, and those of other makes, are left as they are. oneDNN
# reads it before its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

PAD_ROWS = 32


class PackedLinear:
    """A weight in oneDNN's own layout, on a CPU. ``can_pack`` says which weights have one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self._multiply(x) if len(x) != 1 else self._multiply(torch.cat([x, x]))[:1]

    @property
    def weight(self) -> Tensor:
        """A copy of the weight [out, in], read from oneDNN's layout."""
        weight: Tensor = self._weight.to_dense()
        return weight

    def _multiply(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return result


class PlainLinear:
    """A weight in its usual layout; rows are padded to a multiple of PAD_ROWS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.nn.functional.linear(_padded(x), self.weight, self.bias)[: len(x)]


class Head:
    """An output head: a layer to float32 logits of bfloat16 or float32 hidden states.

    Sums are accumulated in float32 and not rounded, as in the trainer, because rounding a logit of 20 to bfloat16
    changes it by up to 0.06. On a CPU, for which torch has no product of bfloat16 factors that returns float32, the
    weight is packed in float32.
    """

    bias = None

    def __init__(self, weight: Tensor) -> None:
        self._layer = make_linear(weight.float(), None) if weight.device.type == "cpu" else None
        self._weight = None if self._layer else weight

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], on a CPU a copy in float32."""
        return self._weight if self._layer is None else self._layer.weight  # type: ignore[return-value]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self._layer is not None:
            return self._layer(x.float())
        return torch.mm(_padded(x), self.weight.T, out_dtype=torch.float32)[: len(x)]


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % PAD_ROWS))


Linear = PackedLinear | PlainLinear | Head
"""A layer from x [rows, in] to x W^T + b [rows, out]; ``weight`` [out, in] is what it computes with."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN packs weights of a type on a device: bfloat16 needs AVX-512 on an x86 processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the layer for ``weight`` [out, in], on its device and in its type."""
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
