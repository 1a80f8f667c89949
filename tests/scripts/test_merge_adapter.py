"""A published adapter becomes a model directory in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from scripts.merge_adapter import merge
from tests.adapters import adapted_logprobs, save_adapter


def test_the_merged_model_computes_what_model_and_adapter_compute(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tiny_model, tmp_path / "adapter", 1)
    merge(adapter, tmp_path / "merged")
    ids = [5, 12, 6, 14, 9, 1]
    wanted = adapted_logprobs(tiny_model, adapter, ids)
    assert adapted_logprobs(tmp_path / "merged", None, ids) == pytest.approx(wanted, abs=1e-5)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()
