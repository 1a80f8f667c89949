"""A policy is saved as a model directory like the one that it came from, with its names, which engines load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from services.core.errors import ConfigurationError
from services.core.machine import Compute, ComputeType
from services.embedded_engine.adapters import read_adapter
from services.embedded_engine.loading import load
from services.embedded_engine.model import Model
from services.engines.settings import RolloutSettings
from tests.adapters import adapted_logprobs
from tests.tolerance import logprob_tolerance
from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import FAMILIES, plain_logprobs, plain_model, random_groups, save_model
from toys import arithmetic
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import save_pretrained
from trainer.model.sharding import reshard


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", FAMILIES["qwen2"])


def test_versions_are_saved_without_asking_for_the_model_again(alone: Ranks, model: Path, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    exact = TrainerSettings.load(model_name=str(model), compute_type="float32", publish_type="float32")
    policy = load_policy(exact, alone)
    shutil.rmtree(model)
    for dtype in (torch.bfloat16, torch.float32):
        saved = tmp_path / str(dtype)
        save_pretrained(policy, alone, saved, Rounding(dtype))
        after = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
        assert after.dtype == dtype
        for name, value in before.state_dict().items():
            torch.testing.assert_close(after.state_dict()[name], value.to(dtype), rtol=0, atol=0)
        assert AutoTokenizer.from_pretrained(saved).get_vocab() == tokenizer.get_vocab()
        of_its_own = {"dtype": str(dtype).removeprefix("torch."), "_name_or_path": str(saved)}
        assert AutoConfig.from_pretrained(saved).to_dict() == config.to_dict() | of_its_own


@pytest.mark.parametrize("shards", [True, False], ids=["sharding", "gathering once"])
def test_float32_weights_are_given_whole_after_a_pass_in_bfloat16(alone: Ranks, model: Path, shards: bool) -> None:
    """Such as the probe of the version before, where no group has an advantage and no update follows."""
    settings = {"compute_type": "bfloat16", "shard_parameters": shards, "lora_rank": 4}
    learner, groups = rank_jobs.make_learner(alone, model, **settings), random_groups(1)
    learner.update(groups, 0)

    def given() -> dict[str, torch.Tensor]:
        merged = learner.policy.full_parameters(Rounding(torch.float32))
        adapters = learner.policy.adapter_parameters(torch.float32)
        return {name: x.clone() for part in (merged, adapters) for name, x in part}

    before = given()
    learner.logprobs(groups)
    for name, value in given().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("file_type", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_keeps_half_of_the_frozen_bytes_and_loses_nothing(
    alone: Ranks, model: Path, monkeypatch: pytest.MonkeyPatch, file_type: torch.dtype
) -> None:
    """On a CPU that decides as on a GPU: adapters, and a reference, train and merge to the same bits."""
    AutoModelForCausalLM.from_pretrained(model, dtype=file_type).save_pretrained(model)
    groups, of_gpu = random_groups(1), Compute("cuda", ComputeType.BFLOAT16, 1, "")

    def trained() -> tuple[set[torch.dtype], dict[str, torch.Tensor], list[object]]:
        learner = rank_jobs.make_learner(alone, model, compute_type="bfloat16", lora_rank=4, kl_coef=0.1)
        learner.update(groups, 0)
        merged = dict(learner.policy.full_parameters(Rounding(torch.float32)))
        reference = rank_jobs.make_learner(alone, model, compute_type="bfloat16", kl_coef=0.1).reference
        assert reference is not None
        learner.reference = reference
        logprobs = [row.tolist() for group in learner.reference_logprobs(groups) for row in group]
        reshard(reference)
        frozen = {p.dtype for p in (*learner.policy.parameters(), *reference.parameters()) if not p.requires_grad}
        assert {p.dtype for p in learner.policy.parameters() if p.requires_grad} == {torch.float32}
        return frozen, merged, logprobs

    on_cpu, weights, logprobs = trained()
    monkeypatch.setattr("trainer.model.policy.choose_compute", lambda *_: of_gpu)
    on_gpu, same_weights, same_logprobs = trained()
    assert on_cpu == {torch.float32}
    assert on_gpu == {torch.bfloat16, file_type}, "a float32 base is merged as it was"
    assert logprobs == same_logprobs
    assert weights.keys() == same_weights.keys()
    for name, value in weights.items():
        assert torch.equal(value, same_weights[name]), name


def test_adapters_trained_on_two_ranks_are_computed_alike_by_the_engine_by_peft_and_merged(
    model: Path, tmp_path: Path
) -> None:
    groups = random_groups(1)
    settings = {"lora_rank": 4, "publish_type": "float32"}
    first, second = run_on_ranks(2, rank_jobs.train_and_write_adapter, model, tmp_path, groups, settings, 1)
    assert [[row.tolist() for row in group] for group in first] == [[row.tolist() for row in group] for group in second]
    engine = load(RolloutSettings.load(model_name=str(model), engine_dtype="float32")).model
    engine.adapter = read_adapter(tmp_path / "adapter", engine.architecture, engine.device)
    merged = load(RolloutSettings.load(model_name=str(tmp_path / "merged"), engine_dtype="float32")).model
    start = plain_model(model)
    tolerance = logprob_tolerance("float32")
    for group, trained in zip(groups, first, strict=True):
        before = plain_logprobs(start, group)
        for sequence, wanted, untrained in zip(group.sequences, trained, before, strict=True):
            ids = group.prompt_ids + sequence.completion_ids.tolist()
            completion = slice(len(group.prompt_ids) - 1, None)
            assert engine_logprobs(engine, ids)[completion] == pytest.approx(wanted, abs=tolerance)
            assert engine_logprobs(merged, ids)[completion] == pytest.approx(wanted, abs=tolerance)
            by_peft = adapted_logprobs(model, tmp_path / "adapter", ids)[completion]
            assert engine_logprobs(engine, ids)[completion] == pytest.approx(by_peft, abs=tolerance)
            assert wanted != pytest.approx(untrained.tolist(), abs=0.01)


def engine_logprobs(engine: Model, ids: list[int]) -> list[float]:
    """Return the embedded engine's log-probabilities of ``ids[1:]``."""
    with torch.inference_mode():
        logprobs = engine.logits(engine.prefill([ids], None, [True])).log_softmax(-1)
    return [float(logprobs[row, ids[row + 1]]) for row in range(len(ids) - 1)]


# --- names that transformers changes ---------------------------------------------------------------------------------


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


def test_buffers_of_the_checkpoint_are_published_and_saved(tmp_path: Path, alone: Ranks) -> None:
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.5)
    model.save_pretrained(tmp_path / "model")
    arithmetic.build_tokenizer().save_pretrained(tmp_path / "model")
    policy = load_policy(TrainerSettings.load(model_name=str(tmp_path / "model")), alone)
    save_pretrained(policy, alone, tmp_path / "saved", Rounding(torch.float32))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "saved"))
    assert after.keys() == before.keys()
    assert after["model.layers.0.layer_scalar"] == before["model.layers.0.layer_scalar"] == 0.5


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
