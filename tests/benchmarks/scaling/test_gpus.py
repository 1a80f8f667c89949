"""The expectations of GPUs follow from counted operations, and the counted traffic from the mesh."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.scaling import roofline
from benchmarks.scaling.__main__ import GPU_DOCS, with_output
from benchmarks.scaling.models import CONFIGS
from benchmarks.scaling.traffic import MESHES, NODE_GPUS, NODES, count
from tests.trainer.tiny import FAMILIES
from trainer.preflight.shape import ModelShape


@pytest.mark.parametrize("label", ["0.5B", "8B"])
def test_the_operations_are_those_that_torch_counts(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[label][1]
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": 2, "layer_types": None})
    monkeypatch.setattr(roofline, "TOKENS", 1024)
    monkeypatch.setattr(roofline, "SEQUENCE", 1024)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        ids = torch.zeros((1, 1024), dtype=torch.int64)
        mask = torch.zeros((1, 1, 1024, 1024), dtype=torch.bfloat16)
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    shape = ModelShape.of(config)
    # Eager attention computes the pairs above the diagonal, too.
    above = 3 * 2 * 2 * 1024 * 1024 / 2 * shape.heads * shape.head_size * shape.layers
    expected = roofline.expected(shape, roofline.GPUS[0])
    assert counter.get_total_flops() - above == pytest.approx(expected.useful, rel=0.01)


def test_utilisation_at_8b_is_above_a_third() -> None:
    one = roofline.expected(ModelShape.of(CONFIGS["8B"][1]), roofline.GPUS[0])
    assert one.utilisation(roofline.GPUS[0]) > 0.35


def test_the_document_shows_what_the_command_prints() -> None:
    text = GPU_DOCS.read_text()
    assert "$ python -m benchmarks.scaling roofline" in text
    assert with_output(text) == text, "run `python -m benchmarks.scaling docs`"


def test_replicas_exchange_only_gradients_between_nodes_and_once_a_step() -> None:
    config = FAMILIES["qwen3"]
    parameters = ModelShape.of(config).parameters
    flat, _, replicated, _ = (count(config, mesh, 2) for mesh in MESHES)
    # Padding to equal shards makes tiny parameters a little larger.
    assert replicated.between == pytest.approx(4 * parameters, rel=0.1)
    assert count(config, MESHES[2], 1).between == replicated.between
    assert flat.between > 3 * replicated.between
    assert NODES * NODE_GPUS == 16
