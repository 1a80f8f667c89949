"""Model directories: read whole whatever their files and types, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.embedded_engine.compute.weights import Architecture, WeightsError, read_directory


@pytest.fixture
def architecture(tiny_model: Path) -> Architecture:
    return Architecture.of(AutoConfig.from_pretrained(tiny_model))


@pytest.fixture
def tensors(tiny_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_model / "model.safetensors")


def test_sharded_bfloat16_weights_are_read_whole(architecture: Architecture, tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    read = read_directory(tmp_path, architecture)
    assert read.keys() == architecture.shapes().keys()
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(read[name], tensor)


def test_a_tied_copy_and_computed_tables_may_be_there(
    architecture: Architecture, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    more = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    assert read_directory(tmp_path, architecture).keys() == architecture.shapes().keys()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is not part of the model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"model.norm.weight is \[7\] instead of \[96\]"),
        (lambda t: t["model.norm.weight"].fill_(torch.inf), "model.norm.weight has values that are not finite"),
        (lambda t: t["model.embed_tokens.weight"][3].fill_(torch.nan), "embed_tokens.* not finite"),
    ],
    ids=["missing", "unknown", "shape", "infinite", "not a number"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    architecture: Architecture, tensors: dict[str, torch.Tensor], tmp_path: Path, spoil: object, reason: str
) -> None:
    spoil(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=reason):
        read_directory(tmp_path, architecture)


def test_files_that_cannot_be_read_are_refused(architecture: Architecture, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="not a directory"):
        read_directory(tmp_path / "nowhere", architecture)
    with pytest.raises(WeightsError, match="does not exist"):
        read_directory(tmp_path, architecture)
    (tmp_path / "model.safetensors").write_bytes(b"half a fi")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_directory(tmp_path, architecture)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    with pytest.raises(WeightsError, match=r"other\.safetensors does not exist"):
        read_directory(tmp_path, architecture)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match="not an index"):
        read_directory(tmp_path, architecture)
