"""Decides what a model is computed on and in: the same rule for the embedded engine and the trainer.

The caller passes what it found of the hardware, so that this module needs no torch and every case can be tested on any
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """The hardware and the type of numbers that a model is computed with. The fields make one line of the log."""

    device: str
    compute_type: ComputeType
    """Never ``auto``. Its value is the name of the dtype in torch."""
    threads: int
    reason: str

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line."""
        return asdict(self)


def decide(setting: str, wanted: ComputeType, *, device: str, multiplies_bfloat16: bool, threads: int) -> Compute:
    """Return what to compute with.

    Args:
        setting: name of the variable that says what is wanted, for the reason.
        wanted: that variable's value.
        device: ``cuda`` or ``cpu``.
        multiplies_bfloat16: whether the processors have instructions for bfloat16; see the function of that name.
        threads: processor threads that compute.
    """
    if wanted is not ComputeType.AUTO:
        return Compute(device, wanted, threads, f"{setting}={wanted}")
    if device == "cuda":
        return Compute(device, ComputeType.BFLOAT16, threads, f"{setting}=auto on a GPU")
    if multiplies_bfloat16:
        reason = f"{setting}=auto on a processor with bfloat16 instructions"
        return Compute(device, ComputeType.BFLOAT16, threads, reason)
    return Compute(device, ComputeType.FLOAT32, threads, f"{setting}=auto on a processor without bfloat16 instructions")


def multiplies_bfloat16(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a processor multiplies bfloat16 natively, from ``torch.cpu.get_capabilities()``."""
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
