"""The rule by which embedded engine and trainer choose the type of numbers that a model is computed in.

The caller describes its hardware, so that this module needs no torch and every case can be tested on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

AUTO_RULE = (
    "bfloat16 on a GPU and on processors with bfloat16 instructions (AVX512-BF16 or AMX), float32 on other processors, "
    "which emulate bfloat16 many times more slowly"
)


class ComputeType(StrEnum):
    """The type of numbers that a model is computed in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Compute:
    """The hardware and the type of numbers that a model is computed with; logged as one line."""

    device: str
    compute_type: ComputeType
    """Never ``auto``; its value is the name of a torch dtype."""
    threads: int
    reason: str


def decide(setting: str, wanted: ComputeType, *, device: str, multiplies_bfloat16: bool, threads: int) -> Compute:
    """Return the hardware and the type of numbers to compute with.

    Args:
        setting: name of the setting, for ``reason``.
        wanted: value of the setting.
        device: ``cuda`` or ``cpu``.
        multiplies_bfloat16: whether the processor has bfloat16 instructions; see the function of that name.
        threads: processor threads that compute.
    """
    if wanted is not ComputeType.AUTO:
        return Compute(device, wanted, threads, f"{setting}={wanted}")
    if device == "cuda":
        return Compute(device, ComputeType.BFLOAT16, threads, f"{setting}=auto on a GPU")
    chosen = ComputeType.BFLOAT16 if multiplies_bfloat16 else ComputeType.FLOAT32
    instructions = "with" if multiplies_bfloat16 else "without"
    return Compute(device, chosen, threads, f"{setting}=auto on a processor {instructions} bfloat16 instructions")


def multiplies_bfloat16(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a processor multiplies bfloat16 natively, from ``torch.cpu.get_capabilities()``."""
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
