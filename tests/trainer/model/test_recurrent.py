"""Recurrent layers over trees give what a plain forward pass of each path gives, and keep siblings apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.core.errors import ConfigurationError
from tests.sequences import trained_sequence
from tests.toy_models import noisy_model
from tests.trainer import rank_jobs
from tests.trainer.model.test_learner import assert_same_gradients, assert_same_weights
from tests.trainer.model.test_rows import OTHERS
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import SHAPE, plain_forward, save_model
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.config import Layout, TrainerSettings
from trainer.model.attention import TREE_ATTENTION, obstacle_to_trees
from trainer.model.learner import Learner
from trainer.model.loading import decoder_layers
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks
from trainer.model.recurrent import check_states, share_states

MAMBA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
NEMOTRON: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "num_hidden_layers": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
}
LFM2_MOE = {
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention"],
}
FAMILIES = {name: OTHERS[name] for name in ("qwen3_5_moe_text", "qwen3_next", "lfm2")} | {
    "qwen3_5_text": OTHERS["qwen3_5_text"] | {"linear_value_head_dim": 12},
    "lfm2_moe": LFM2_MOE,
    "granitemoehybrid": MAMBA,
    "nemotron_h": NEMOTRON,
}
QUICK = ("qwen3_5_text",)

families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES]
)


def models_of(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a tiny model over trees, and the same by transformers alone."""
    config = SHAPE | FAMILIES[family]
    plain = noisy_model(AutoConfig.for_model(family, **config), matrices=0.1, vectors=0.1).float().eval()
    over_trees = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **config), attn_implementation=TREE_ATTENTION
    ).eval()
    over_trees.load_state_dict(plain.state_dict())
    share_states(over_trees)
    check_states(decoder_layers(over_trees.base_model), SHAPE["hidden_size"])
    return over_trees, plain


def sequence_of(tokens: list[int]) -> Any:
    return trained_sequence(tokens, [-1.0] * len(tokens), [1.0] * len(tokens))


def tree_of(seed: int, *branches: tuple[int, ...], prompt: int = 70) -> TrainingGroup:
    """Return a group with branches; each is the lengths of its levels, and branches share all levels but the last."""
    draw = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(2, SHAPE["vocab_size"], (count,), generator=draw).tolist()

    levels = {length: ids(length) for branch in branches for length in branch[:-1]}
    sequences = [
        [*(token for length in branch[:-1] for token in levels[length]), *ids(branch[-1])] for branch in branches
    ]
    return TrainingGroup(ids(prompt), [sequence_of(tokens) for tokens in sequences], f"tree-{seed}")


THREE_LEVELS = [
    tree_of(1, (66, 3), (66, 40, 1), (66, 40, 90), (5,)),
    tree_of(2, (2, 1, 30), (2, 1, 4), (2, 9), (130,), prompt=1),
    tree_of(3, (20,), prompt=3),
]
"""Trees of at least three levels, with siblings of other lengths, and a tree without branches."""


def alone(model: PreTrainedModel, groups: list[TrainingGroup]) -> Tensor:
    """Return the log-probabilities of each completion by itself."""
    return torch.cat([logprobs for group in groups for logprobs, _ in plain_forward(model, group)])


def in_trees(model: PreTrainedModel, groups: list[TrainingGroup]) -> Tensor:
    batch = pack(groups)
    assert batch.segments is not None
    assert len(batch.segments.depths) >= 2, "some tokens begin from a state"
    logprobs: Tensor = Policy(model, 1.0)(batch).logprobs
    return logprobs


@families
def test_log_probabilities_and_gradients_are_those_of_each_path_alone(family: str) -> None:
    over_trees, plain = models_of(family)
    ours, theirs = in_trees(over_trees, THREE_LEVELS), alone(plain, THREE_LEVELS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    weights = torch.randn(len(ours), generator=torch.Generator().manual_seed(0))
    gradients = [
        torch.autograd.grad((weights * logprobs).sum(), list(model.parameters()), materialize_grads=True)
        for logprobs, model in ((ours, over_trees), (theirs, plain))
    ]
    largest = max(float(gradient.abs().max()) for gradient in gradients[1])
    for (name, _), mine, others in zip(plain.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=1e-5 * largest, msg=name)


@families
@torch.no_grad()
def test_neither_siblings_nor_other_samples_change_a_path(family: str) -> None:
    """Others of the same lengths change nothing, to the bit; others of other lengths only the order of sums."""
    model, _ = models_of(family)
    group, other = THREE_LEVELS[0], THREE_LEVELS[1]
    first, *siblings = group.sequences
    n = len(first.completion_ids)

    def of_first(siblings: list[Any], others: list[TrainingGroup]) -> Tensor:
        return in_trees(model, [*others, TrainingGroup(group.prompt_ids, [*siblings, first])])[-n:]

    expected = of_first(siblings, [other])
    # The first token of a branch stays, and with it the order of the branches.
    changed = [with_other_tokens(sibling, last) for sibling, last in zip(siblings, (0, 80, 4), strict=True)]
    changed_sample = TrainingGroup([(other.prompt_ids[0] + 1) % SHAPE["vocab_size"]], other.sequences)
    assert torch.equal(of_first(changed, [changed_sample]), expected)
    longer = sequence_of([3] * 50)
    for siblings_now, others in (
        (siblings[:1], [other]),
        ([*siblings, longer], [THREE_LEVELS[2], other]),
        (siblings, []),
    ):
        torch.testing.assert_close(of_first(siblings_now, others), expected, rtol=1e-6, atol=1e-6)


def with_other_tokens(sequence: Any, last: int) -> Any:
    """Return a sequence of the same length with other tokens at its end."""
    tokens = sequence.completion_ids.tolist()
    start = len(tokens) - last
    return sequence_of([*tokens[:start], *((token + 5) % SHAPE["vocab_size"] for token in tokens[start:])])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bfloat16_is_within_the_rounding_of_the_plain_model(family: str) -> None:
    over_trees, plain = models_of(family)
    exact = alone(plain, THREE_LEVELS)
    errors = [
        float((logprobs - exact).square().mean().sqrt())
        for logprobs in (in_trees(over_trees.bfloat16(), THREE_LEVELS), alone(plain.bfloat16(), THREE_LEVELS))
    ]
    assert errors[0] < 1.2 * errors[1]


WITHOUT_BUFFERS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"use_expert_bias": False},
    "nemotron_h": {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]},
}
"""Configurations whose checkpoints have parameters only: no other is trained, whatever its layout (`check_names`)."""
STEPS: dict[str, dict[str, Any]] = {
    "full": {},
    "recomputation": {"activation_checkpointing": True},
    "adapters": {"lora_rank": 2},
    "critic": {"advantage": "gae", "critic": "shared"},
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(f, o, id=f"{f}-{name}", marks=[] if f in QUICK and name == "recomputation" else [pytest.mark.slow])
        for f in FAMILIES
        for name, o in STEPS.items()
        if f in QUICK or name == "full"
    ],
)
def test_a_step_is_the_same_by_either_layout(
    family: str, options: dict[str, Any], alone: Ranks, tmp_path: Path
) -> None:
    config = SHAPE | FAMILIES[family] | WITHOUT_BUFFERS.get(family, {})
    model = save_model(tmp_path, AutoConfig.for_model(family, **config))
    updates, weights = [], []
    for layout in (Layout.TREE, Layout.ROWS):
        settings = TrainerSettings(model_name=str(model), layout=layout, micro_batch_tokens=1000, **options)
        ranks = alone.laid_out(layout)
        policy = load_policy(settings, ranks)
        updates.append(Learner(settings, policy, ranks, 1).update(THREE_LEVELS, 0).metrics)
        weights.append({name: x.detach().clone() for name, x in policy.named_parameters()})
    assert updates[0] == pytest.approx(updates[1], abs=1e-5)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_two_ranks_of_trees_make_the_update_of_one(family: str, alone: Ranks, tmp_path: Path) -> None:
    """Two ranks cut the trees into other pieces, one of them has more micro-batches, and layers are recomputed."""
    model = save_model(tmp_path, AutoConfig.for_model(family, **SHAPE | FAMILIES[family]))
    whole = rank_jobs.update(alone, model, {"micro_batch_tokens": 10_000}, THREE_LEVELS)
    settings = {"micro_batch_tokens": 200, "activation_checkpointing": True}
    by_rank = run_on_ranks(2, rank_jobs.update, model, settings, THREE_LEVELS)
    for trained in by_rank:
        assert trained.result.metrics == pytest.approx(whole.result.metrics, rel=1e-4, abs=1e-6)
        assert_same_gradients(trained.gradients, whole.gradients, 1e-4)  # of sums over chunks that begin elsewhere
    assert_same_weights(by_rank[1].weights, by_rank[0].weights)


def test_a_layer_that_does_not_hand_on_the_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models_of("lfm2")
    layers = decoder_layers(model.base_model)
    forward = type(layers[0]).forward
    monkeypatch.setattr(type(layers[0]), "forward", lambda self, *args, seq_idx=None, **kw: forward(self, *args, **kw))
    with pytest.raises(ConfigurationError, match="LAYOUT=tree: Lfm2DecoderLayer"):
        check_states(layers, SHAPE["hidden_size"])


def test_an_older_transformers_computes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("lfm2", **SHAPE | FAMILIES["lfm2"])
    assert obstacle_to_trees(config) == ""
    monkeypatch.setattr("trainer.model.recurrent.OLDEST", "99.0")
    assert "99.0" in obstacle_to_trees(config)
