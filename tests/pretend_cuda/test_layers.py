"""Decoder layers as FSDP has wrapped them are compiled to an H100's machine code, both passes. They are not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from services.core.errors import ConfigurationError
from tests.pretend_cuda.compiled import compiled_alone
from tests.pretend_cuda.learner import pretended_ranks
from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import FAMILIES, random_groups, save_model, with_heads_of

pytestmark = pytest.mark.cuda

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads as of Qwen2.5-0.5B": ("qwen2", {}),
    "qwen3, some activations again": ("qwen3", {"activation_checkpointing": "selective"}),
    "mixture": ("qwen3_moe", {}),
    "windows, sinks and experts with biases": ("gpt_oss", {}),
    "windows and caps": ("gemma2", {}),
    "adapters": ("llama", {"lora_rank": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_layer_compiles_forward_and_backward_for_micro_batches_of_any_length(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = CASES[case]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    save_model(tmp_path / "model", with_heads_of(64, family))
    with pretended_ranks() as ranks:
        learner = make_learner(ranks, tmp_path / "model", compute_type="bfloat16", **settings)
        with compiled_alone():
            learner.update(random_groups(0, n_groups=12, longest=20), 0)
    compiled = {path.name for path in (tmp_path / "triton").rglob("*.cubin")}
    attention = {name for name in compiled if "_tem_" in name and "flex_attention" in name}
    assert {"backward" in name for name in attention} == {False, True}, compiled
    code = [path.read_text() for path in (tmp_path / "inductor").rglob("*.py")]
    assert not any('"f64[][]cpu"' in text for text in code), "no number is a tensor on the host"


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (FAMILIES["llama"], {"compute_type": "bfloat16"}, "MODEL_NAME: llama has attention heads of 8 numbers"),
        (with_heads_of(16, "qwen3_moe"), {"compute_type": "float32"}, "COMPUTE_TYPE=float32: on a GPU .* set COMPUTE"),
        (
            with_heads_of(16, "qwen3"),
            {"compute_type": "float32", "attention_kernel": "flash"},
            "ATTENTION_KERNEL=flash computes in bfloat16 only",
        ),
    ],
)
def test_a_model_that_no_kernel_computes_is_refused(
    config: PretrainedConfig, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, config)
    with pretended_ranks() as ranks, pytest.raises(ConfigurationError, match=message):
        make_learner(ranks, tmp_path, **settings)
