"""A policy is published and saved under the names of its checkpoint, whatever transformers calls its parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.core.errors import ConfigurationError
from services.embedded_engine.loading import load
from services.engines.settings import RolloutSettings
from tests.tolerance import logprob_tolerance
from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import FAMILIES, random_groups, save_model
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding

Tensors = dict[str, Tensor]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", FAMILIES["qwen3_moe"])


def test_a_trained_mixture_is_saved_with_the_names_of_its_checkpoint_and_the_engine_computes_it(
    mixture: Path, tmp_path: Path
) -> None:
    groups = random_groups(2)
    trained = run_on_ranks(2, rank_jobs.update_and_save_model, mixture, tmp_path / "saved", groups, {})[0]
    before, after = (load_file(directory / "model.safetensors") for directory in (mixture, tmp_path / "saved"))
    assert {name: tensor.shape for name, tensor in after.items()} == {name: t.shape for name, t in before.items()}
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert any("mlp.experts.0.gate_proj" in name for name in moved)
    engine = load(RolloutSettings.load(model_name=str(tmp_path / "saved"), engine_dtype="float32")).model
    for group, wanted in zip(groups, trained, strict=True):
        for sequence, logprobs in zip(group.sequences, wanted, strict=True):
            ids = group.prompt_ids + sequence.completion_ids.tolist()
            with torch.inference_mode():
                scores = engine.logits(engine.prefill([ids], None)).log_softmax(-1)
            given = [float(scores[row, ids[row + 1]]) for row in range(len(group.prompt_ids) - 1, len(ids) - 1)]
            assert given == pytest.approx(logprobs, abs=logprob_tolerance("float32"))


def with_fused_experts(tensors: Tensors) -> Tensors:
    """Return the parameters as transformers keeps them, which it also loads, but no engine does."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    experts = "model.layers.0.mlp.experts"
    return fused | {f"{experts}.gate_up_proj": torch.zeros(4, 48, 32), f"{experts}.down_proj": torch.zeros(4, 32, 24)}


def with_a_buffer(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.mlp.gate.e_score_correction_bias": torch.zeros(4)}


def without_the_head(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_fused_experts, r"not in the checkpoint: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight, "),
        (with_a_buffer, r"missing from what would be published: .*e_score_correction_bias; not in .*: none"),
        (without_the_head, r"published: none; not in the checkpoint: lm_head\.weight\. Choose"),
    ],
)
def test_a_checkpoint_of_other_names_is_refused(
    mixture: Path, alone: Ranks, change: Callable[[Tensors], Tensors], message: str
) -> None:
    file = mixture / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=message):
        load_policy(TrainerSettings.load(model_name=str(mixture)), alone)


def test_adapters_of_a_mixture_are_refused(mixture: Path, alone: Ranks) -> None:
    with pytest.raises(ConfigurationError, match=r"LORA_RANK: qwen3_moe .*mlp\.experts\.down_proj, "):
        load_policy(TrainerSettings.load(model_name=str(mixture), lora_rank=2), alone)


@pytest.mark.parametrize("family", ["llama-one-key-head", "qwen2"])
def test_tied_weights_and_rotary_tables_may_be_in_the_checkpoint(tmp_path: Path, alone: Ranks, family: str) -> None:
    file = save_model(tmp_path / "model", FAMILIES[family]) / "model.safetensors"
    tensors = load_file(file)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(
        tensors | extra | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"}
    )
    policy = load_policy(TrainerSettings.load(model_name=str(file.parent)), alone)
    assert {name for name, _ in policy.full_parameters(Rounding(torch.float32))} == tensors.keys()
