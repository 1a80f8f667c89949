"""Model directories: read whole whatever their files and types, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.embedded_engine.weights import Architecture, WeightsError, read_directory


@pytest.fixture
def architecture(tiny_model: Path) -> Architecture:
    return Architecture(AutoConfig.from_pretrained(tiny_model))


@pytest.fixture
def tensors(tiny_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_model / "model.safetensors")


def test_sharded_bfloat16_weights_are_read_whole(architecture: Architecture, tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    read = read_directory(tmp_path, architecture)
    assert read.keys() == architecture.shapes.keys()
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
    assert read_directory(tmp_path, architecture).keys() == architecture.shapes.keys()


def test_weights_that_do_not_fit_are_refused_by_name(
    architecture: Architecture, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for name, value, reason in [
        ("model.norm.weight", None, "model.norm.weight is missing"),
        ("extra", torch.ones(1), "extra is not part of the model"),
        ("model.norm.weight", torch.ones(7), r"model.norm.weight is \[7\] instead of \[96\]"),
        ("model.norm.weight", torch.full((96,), torch.inf), "model.norm.weight has values that are not finite"),
        (
            "model.norm.weight",
            torch.tensor([torch.nan] + [1.0] * 95),
            "model.norm.weight has values that are not finite",
        ),
    ]:
        spoilt = {key: tensor for key, tensor in (tensors | {name: value}).items() if tensor is not None}
        save_file(spoilt, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=reason):
            read_directory(tmp_path, architecture)


def test_files_that_cannot_be_read_are_refused(architecture: Architecture, tmp_path: Path) -> None:
    for name, content, reason in [
        ("", b"", "does not exist"),
        ("model.safetensors", b"half a fi", "cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "other.safetensors"}}', r"other\.safetensors does not"),
        ("model.safetensors.index.json", b"{", "not an index"),
    ]:
        if name:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=reason):
            read_directory(tmp_path, architecture)
    with pytest.raises(WeightsError, match="not a directory"):
        read_directory(tmp_path / "nowhere", architecture)
