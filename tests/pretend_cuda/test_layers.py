"""Decoder layers as FSDP has wrapped them are compiled to an H100's machine code, both passes. They are not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from transformers import PretrainedConfig

from tests.pretend_cuda.learner import pretended_ranks
from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import FAMILIES, random_groups, save_model

pytestmark = pytest.mark.cuda

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3, some activations again": ("qwen3", {"activation_checkpointing": "selective"}),
    "mixture": ("qwen3_moe", {}),
    "adapters": ("llama", {"lora_rank": 4}),
}


class _Compiled(Exception):
    """The layer has been compiled and would run."""


def wide(family: str) -> PretrainedConfig:
    """Return a family's tiny configuration with heads of 64 numbers, as Qwen2.5-0.5B has."""
    return type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), "hidden_size": 256, "head_dim": 64})


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_layer_compiles_forward_and_backward_for_micro_batches_of_any_length(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = CASES[case]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def stop(*_: Any) -> None:
        raise _Compiled

    monkeypatch.setattr(CompiledFxGraph, "__call__", stop)
    torch._dynamo.reset()
    save_model(tmp_path / "model", wide(family))
    with (
        pretended_ranks() as ranks,
        config.patch(compile_threads=1),
        functorch.patch(force_non_lazy_backward_lowering=True),
    ):
        learner = make_learner(ranks, tmp_path / "model", compute_type="bfloat16", **settings)
        with pytest.raises(_Compiled):
            learner.update(random_groups(0, n_groups=12, longest=20), 0)
    compiled = {path.name for path in (tmp_path / "triton").rglob("*.cubin")}
    assert any("flex_attention_backward" in name for name in compiled), compiled
    assert any("tem_fused_flex_attention" in name and "backward" not in name for name in compiled), compiled
