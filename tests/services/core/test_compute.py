"""Engine and trainer decide by the same rule what they compute in, and say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from services.core.compute import Compute, ComputeType, decide, multiplies_bfloat16
from services.embedded_engine.compute.loading import load
from services.rollout_server.settings import RolloutSettings
from tests.tolerance import BOTH_TYPES
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks

WITH, WITHOUT = {"avx512_bf16": True}, {"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("wanted", "device", "has_instructions", "chosen", "reason"),
    [
        ("auto", "cpu", True, "bfloat16", "X=auto on a processor with bfloat16 instructions"),
        ("auto", "cpu", False, "float32", "X=auto on a processor without bfloat16 instructions"),
        ("auto", "cuda", False, "bfloat16", "X=auto on a GPU"),
        ("float32", "cuda", True, "float32", "X=float32"),
        ("bfloat16", "cpu", False, "bfloat16", "X=bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_multiplies_it(
    wanted: str, device: str, has_instructions: bool, chosen: str, reason: str
) -> None:
    decided = decide("X", ComputeType(wanted), device=device, multiplies_bfloat16=has_instructions, threads=3)
    assert decided == Compute(device, ComputeType(chosen), 3, reason)


@pytest.mark.parametrize(
    ("capabilities", "expected"), [(WITH, True), ({"amx_bf16": True}, True), (WITHOUT, False), ({"bf16": True}, False)]
)
def test_bfloat16_instructions_are_those_of_avx512_and_amx(capabilities: dict[str, Any], expected: bool) -> None:
    assert multiplies_bfloat16(capabilities) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides before the processor does")
@pytest.mark.parametrize("capabilities", [WITH, WITHOUT], ids=["with instructions", "without"])
@pytest.mark.parametrize("wanted", ["auto", *BOTH_TYPES])
def test_engine_and_trainer_compute_in_the_same_type_and_say_it_in_the_same_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], wanted: str
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    kind = ("bfloat16" if capabilities is WITH else "float32") if wanted == "auto" else wanted
    with structlog.testing.capture_logs() as lines:
        engine = load(RolloutSettings.load(model_name=str(tiny_model), engine_dtype=wanted))
        with join_ranks() as ranks:
            policy = load_policy(TrainerSettings.load(model_name=str(tiny_model), compute_type=wanted), ranks)
    assert engine.model.dtype == engine.model.weights.embedding.dtype == getattr(torch, kind)
    assert policy.compute is not None
    assert policy.compute.compute_type == kind
    engines, trainers = (line for line in lines if line["event"] == "computing")
    assert engines["reason"].startswith(f"ENGINE_DTYPE={wanted}")
    assert trainers.pop("reason") == engines.pop("reason").replace("ENGINE_DTYPE", "COMPUTE_TYPE")
    expected = {"device": "cpu", "compute_type": kind, "threads": torch.get_num_threads()}
    assert engines == trainers == {"event": "computing", "log_level": "info", **expected}
