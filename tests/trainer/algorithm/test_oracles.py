"""The algorithm against two libraries' own implementations, on random ragged batches: verl 0.9.1 and TRL 1.16.

They are not among the test requirements, since they pull in much that nothing else here needs: `make test-oracles`
installs them and runs this file. Where a library differs from a paper, the test says how the two are made to agree.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sequences import trained_sequence
from tests.trainer.algorithm.formulas import loss_tokens
from tests.trainer.ragged import Ragged, random_ragged
from trainer.algorithm import gae
from trainer.algorithm.advantages import ADVANTAGE_FUNCTIONS, Outcomes, gdpo
from trainer.algorithm.loss import KL_LIMIT, StepSize, aggregate, k3, kl_penalty
from trainer.algorithm.methods import Aggregation, ImportanceCorrection
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.algorithm.policy_losses import (
    LOSS_FUNCTIONS,
    clipped,
    importance_weights,
    off_policy_mask,
    sapo,
)
from trainer.config import TrainerSettings
from trainer.config.objective import step_loss
from trainer.model.logprobs import Lesson, divergence

pytestmark = pytest.mark.oracles

SEEDS = range(6)
# verl's mean over a sequence adds 1e-8 to its length.
CLOSE: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9}


def oracle(module: str) -> Any:
    """Import a library's module; where something of it is missing, the test fails with what installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return pytest.fail(f"{module} cannot be imported ({error}); `make test-oracles` installs it")


@pytest.fixture(scope="module")
def verl() -> Any:
    return oracle("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def trl() -> Any:
    return oracle("trl.trainer.grpo_trainer")


def aggregated(losses: Tensor, batch: Ragged, method: Aggregation, constant_length: int = 16) -> Tensor:
    ones = torch.ones_like(losses)
    part: Any = SimpleNamespace(sequence_ids=batch.sequence_ids, n_sequences=batch.n_sequences, group_tokens=ones)
    return aggregate(losses, part, method, StepSize(sum(batch.lengths), batch.n_sequences), constant_length)


def random_rewards(seed: int) -> tuple[Tensor, Tensor]:
    """[24] rewards and group ids: groups of several sizes in a shuffled order, one of equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3] * 10)[torch.randperm(24, generator=generator)]
    rewards = torch.randn(24, dtype=torch.float64, generator=generator)
    rewards[ids == 1] = 0.5
    return rewards, ids


# --- verl ------------------------------------------------------------------------------------------------------------


VERL_ADVANTAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}),
    "dr_grpo": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("compute_rloo_outcome_advantage", {}),
    "reinforce": ("compute_reinforce_plus_plus_outcome_advantage", {"config": SimpleNamespace(gamma=1.0)}),
    "reinforce_baseline": ("compute_reinforce_plus_plus_baseline_outcome_advantage", {}),
    "pass_at_k": ("compute_grpo_passk_outcome_advantage", {"config": {"norm_adv_by_std_in_grpo": False}}),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", VERL_ADVANTAGES)
def test_advantages_are_verls(verl: Any, seed: int, method: str) -> None:
    rewards, ids = random_rewards(seed)
    lengths = torch.randint(1, 9, (24,), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(9) < lengths[:, None]).double()
    token_rewards = torch.zeros(24, 9, dtype=torch.float64)
    token_rewards[torch.arange(24), lengths - 1] = rewards
    name, options = VERL_ADVANTAGES[method]
    options = options if method == "reinforce" else options | {"index": ids.numpy()}
    expected, _ = getattr(verl, name)(token_level_rewards=token_rewards, response_mask=mask, **options)
    ours = ADVANTAGE_FUNCTIONS[method](Outcomes(rewards, ids, lengths, eps=1e-6))
    torch.testing.assert_close(ours[:, None] * mask, expected, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weights", [None, [1.0, 0.5]])
def test_gdpo_is_verls(verl: Any, seed: int, weights: list[float] | None) -> None:
    first, ids = random_rewards(seed)
    second, _ = random_rewards(seed + 100)
    lengths = torch.randint(1, 9, (24,), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(9) < lengths[:, None]).long()
    expected, _ = verl.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros(24, 9),
        response_mask=mask,
        index=ids.numpy(),
        epsilon=1e-6,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": weights},
        non_tensor_batch={"a": first.numpy(), "b": second.numpy()},
        batch={"prompts": torch.zeros(24, 1), "attention_mask": torch.cat([torch.ones(24, 1), mask], 1).long()},
    )
    named = None if weights is None else dict(zip("ab", weights, strict=True))
    components = {"a": first.float().double(), "b": second.float().double()}
    ours = gdpo(Outcomes(first + second, ids, lengths, 1e-6, components), named)
    torch.testing.assert_close((ours[:, None] * mask).float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_clipped_surrogate_is_verls_in_value_and_gradient(verl: Any, seed: int, dual_clip: float | None) -> None:
    batch = random_ragged(seed, spread=1.0)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    expected, *_ = verl.compute_policy_loss(
        batch.padded("old"),
        theirs,
        batch.padded("advantage"),
        batch.mask,
        cliprange_low=0.2,
        cliprange_high=0.28,
        clip_ratio_c=dual_clip or 1e9,
        loss_agg_mode="token-mean",
    )
    losses = clipped(loss_tokens(batch, ours), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip).losses
    assert_same(batch, aggregated(losses, batch, Aggregation.TOKEN_MEAN), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["gspo", "cispo"])
@pytest.mark.parametrize("method", [Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_MEAN])
def test_gspo_and_cispo_are_verls_in_value_and_gradient(verl: Any, seed: int, name: str, method: Aggregation) -> None:
    # verl leaves completions without tokens out of the count of sequences; here they count, so there is none.
    batch = random_ragged(seed, shortest=2)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    config = oracle("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.05,
        clip_ratio_high=0.1,
    )
    mode = {Aggregation.TOKEN_MEAN: "token-mean", Aggregation.SEQUENCE_MEAN: "seq-mean-token-mean"}[method]
    expected, _ = verl.get_policy_loss_fn(name)(
        batch.padded("old"), theirs, batch.padded("advantage"), batch.mask, loss_agg_mode=mode, config=config
    )
    losses = LOSS_FUNCTIONS[name](loss_tokens(batch, ours), clip_low=0.05, clip_high=0.1).losses
    assert_same(batch, aggregated(losses, batch, method), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("method", "mode"),
    [
        (Aggregation.TOKEN_MEAN, "token-mean"),
        (Aggregation.SEQUENCE_MEAN, "seq-mean-token-mean"),
        (Aggregation.CONSTANT_LENGTH, "seq-mean-token-sum-norm"),
    ],
)
def test_aggregations_are_verls(verl: Any, seed: int, method: Aggregation, mode: str) -> None:
    batch = random_ragged(seed)
    expected = verl.agg_loss(
        batch.padded("theta"), batch.mask, mode, global_batch_size=batch.n_sequences, loss_scale_factor=16
    )
    torch.testing.assert_close(aggregated(batch.packed("theta"), batch, method), expected, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_verls_in_value_and_gradient(seed: int) -> None:
    batch = random_ragged(seed, shortest=2)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    config = oracle("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, tau_pos=1.0, tau_neg=1.05
    )
    expected, _ = oracle("verl.trainer.ppo.core_algos").get_policy_loss_fn("sapo")(
        batch.padded("old"), theirs, batch.padded("advantage"), batch.mask, config=config
    )
    losses = sapo(loss_tokens(batch, ours)).losses
    assert_same(batch, aggregated(losses, batch, Aggregation.SEQUENCE_MEAN), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_is_verls_in_value_and_gradient(verl: Any, seed: int, name: str) -> None:
    """verl's loss has the value -min(rho, C) A log pi, and the gradient of -rho A where rho is at most C."""
    batch = random_ragged(seed, n_sequences=30, shortest=2, broken=False)
    # verl's probabilities have no bounds, so theta's must be below 1.
    theirs, ours = batch.padded("theta").clamp(max=-0.01), batch.packed("theta").clamp(max=-0.01)
    old, packed_old = batch.padded("old").clamp(max=-0.01), batch.packed("old").clamp(max=-0.01)
    theirs, ours = theirs.requires_grad_(), ours.requires_grad_()
    expected, reported = verl.get_policy_loss_fn(name)(
        old, theirs, batch.padded("advantage"), batch.mask, config=dppo_config(low=0.04, high=0.06, cap=100.0)
    )
    (wanted,) = torch.autograd.grad(expected, theirs)
    result = LOSS_FUNCTIONS[name](
        replace(loss_tokens(batch, ours), old_logprobs=packed_old), clip_low=0.04, clip_high=0.06
    )
    (gradient,) = torch.autograd.grad(aggregated(result.losses, batch, Aggregation.TOKEN_MEAN), ours)
    torch.testing.assert_close(gradient, batch.unpadded(wanted), rtol=1e-6, atol=1e-9)
    values = result.losses.detach() * ours.detach()
    torch.testing.assert_close(aggregated(values, batch, Aggregation.TOKEN_MEAN), expected.detach(), **CLOSE)
    moved = batch.packed("advantage") != 0
    masked = result.metrics["clip_fraction_low"] | result.metrics["clip_fraction_high"]
    assert 0 < masked[moved].double().mean() < 1
    assert reported["actor/pg_clipfrac"] > 0


def dppo_config(*, low: float, high: float, cap: float) -> Any:
    """Return verl's settings of DPPO."""
    return oracle("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=cap,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kl_penalty_is_verls_k3_with_the_gradient_of_k2(verl: Any, seed: int) -> None:
    batch = random_ragged(seed)
    ours, theirs = (batch.packed("theta").requires_grad_() for _ in range(2))
    reference = batch.packed("reference")
    torch.testing.assert_close(k3(ours, reference).clamp(max=KL_LIMIT), verl.kl_penalty(ours, reference, "k3"), **CLOSE)
    penalty, expected = kl_penalty(ours, reference, torch.ones_like(ours)), verl.kl_penalty(theirs, reference, "k3+")
    torch.testing.assert_close(penalty, expected, **CLOSE)
    (gradient,), (wanted,) = torch.autograd.grad(penalty.sum(), ours), torch.autograd.grad(expected.sum(), theirs)
    torch.testing.assert_close(gradient, wanted, **CLOSE)


def weights_of(batch: Ragged, correction: ImportanceCorrection, cap: float | None = None, theta: str = "old") -> Tensor:
    return importance_weights(
        correction, batch.packed(theta), batch.packed("behaviour"), batch.sequence_ids, batch.n_sequences, cap
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("correction", "level", "threshold"),
    [("truncated", "token", 2.0), ("icepop", "token", "0.5_5.0"), ("sequence", "sequence", 2.0)],
)
def test_importance_weights_are_verls(seed: int, correction: str, level: str, threshold: float | str) -> None:
    batch = random_ragged(seed, spread=0.5)
    helper = oracle("verl.trainer.ppo.rollout_corr_helper")
    weights, _ = helper.compute_rollout_correction_weights(
        batch.padded("theta") - batch.padded("behaviour"),
        batch.mask,
        rollout_is=level,
        rollout_is_threshold=threshold,
    )
    ours = weights_of(batch, ImportanceCorrection(correction), theta="theta")
    torch.testing.assert_close(ours, batch.unpadded(weights), **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_geometric_rejection_is_verls(seed: int) -> None:
    batch = random_ragged(seed, spread=0.5, shortest=1)
    helper = oracle("verl.trainer.ppo.rollout_corr_helper")
    mask, _ = helper.compute_rollout_rejection_mask(
        batch.padded("theta") - batch.padded("behaviour"),
        batch.mask,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold=f"{1 / 1.2}_{1.2}",
    )
    ours = weights_of(batch, ImportanceCorrection.GEOMETRIC, 1.2, theta="theta")
    assert (ours > 0).tolist() == batch.unpadded(mask).bool().tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["vanilla", "gspo"])
@pytest.mark.parametrize(("correction", "level"), [("truncated", "token"), ("sequence", "sequence")])
def test_one_update_on_stale_tokens_is_the_decoupled_objective_of_verl(
    verl: Any, seed: int, name: str, correction: str, level: str
) -> None:
    """verl's recomputed log-probabilities of the old policy are those of the policy itself before its only update."""
    batch = random_ragged(seed, spread=0.5, shortest=2, broken=False)
    theirs = batch.padded("theta").requires_grad_()
    config = oracle("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, clip_ratio=0.2
    )
    helper = oracle("verl.trainer.ppo.rollout_corr_helper")
    weights, _ = helper.compute_rollout_correction_weights(
        theirs.detach() - batch.padded("behaviour"), batch.mask, rollout_is=level, rollout_is_threshold=2.0
    )
    expected, _ = verl.get_policy_loss_fn(name)(
        theirs.detach(),
        theirs,
        batch.padded("advantage"),
        batch.mask,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=weights,
    )
    loss, gradient = one_update(batch, loss={"vanilla": "clipped"}.get(name, name), importance_correction=correction)
    torch.testing.assert_close(loss, expected.detach().float(), rtol=1e-5, atol=1e-6)
    (wanted,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(gradient, batch.unpadded(wanted).float(), rtol=1e-5, atol=1e-7)


LOWER = 8.0


def one_update(batch: Ragged, proximal: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of a step and its gradient at every token, as the trainer computes them, float32.

    All log-probabilities are lowered by LOWER, because a sequence has none above 0. The loss knows differences alone.
    """
    sequences = [
        trained_sequence([2 + s, *[1] * (length - 1)], [value - LOWER for value in behaviour], advantages)
        for s, (length, behaviour, advantages) in enumerate(
            zip(batch.lengths, batch.rows["behaviour"], batch.rows["advantage"], strict=True)
        )
    ]
    micro_batch = pack([TrainingGroup([1], sequences)])
    theta = (batch.packed("theta") - LOWER).float().requires_grad_()
    step = StepSize(tokens=sum(batch.lengths), sequences=batch.n_sequences)
    chosen = TrainerSettings.load(aggregation="token_mean", updates_per_batch=1 if proximal is None else 2, **settings)
    entropies = torch.zeros_like(theta)
    lowered = None if proximal is None else proximal - LOWER
    loss, _ = step_loss(chosen)(micro_batch, theta, entropies, step, proximal_logprobs=lowered)
    return loss.detach(), torch.autograd.grad(loss, theta)[0]


# --- TRL, which does not clamp broken tokens --------------------------------------------------------------------------


def trl_loss(trl: Any, batch: Ragged, theta: Tensor, **options: Any) -> Tensor:
    """Return TRL's loss of the batch; ``theta`` [S, L] stands for the log-probabilities of its model."""
    settings: dict[str, Any] = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "delta": None,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "off_policy_max_kl": None,
    } | options
    alone = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True, is_main_process=True
    )
    trainer = SimpleNamespace(
        **{name: value for name, value in settings.items() if name not in ("delta", "off_policy_max_kl")},
        args=SimpleNamespace(
            delta=settings["delta"],
            use_bias_correction_kl=True,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=2.0,
        ),
        accelerator=alone,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings["off_policy_max_kl"],
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=16,
        _entropy_bonus_enabled=False,
        _metrics={"train": _AnyList()},
        _get_per_token_logps_and_entropies=lambda *_, **__: (theta, torch.zeros_like(theta), None),
    )
    weights = verl_weights(batch) if settings["use_vllm"] else None
    inputs = {
        "prompt_ids": torch.zeros(batch.n_sequences, 1).long(),
        "prompt_mask": torch.ones(batch.n_sequences, 1).long(),
        "completion_ids": torch.zeros_like(batch.mask),
        "completion_mask": batch.mask,
        "advantages": batch.padded("advantage")[:, :1],
        "old_per_token_logps": batch.padded("old"),
        "ref_per_token_logps": batch.padded("reference"),
        "importance_sampling_ratio": weights,
        "num_items_in_batch": batch.mask.sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[no-any-return]


class _AnyList(dict[str, list[Any]]):
    def __missing__(self, key: str) -> list[Any]:
        return self.setdefault(key, [])


def verl_weights(batch: Ragged) -> Tensor:
    """[S, L] min(pi_old / pi_behaviour, 2), what TRL calls vLLM's importance sampling ratio."""
    return (batch.padded("old") - batch.padded("behaviour")).exp().clamp(max=2.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss_type", "method"),
    [
        ("dapo", Aggregation.TOKEN_MEAN),
        ("grpo", Aggregation.SEQUENCE_MEAN),
        ("dr_grpo", Aggregation.CONSTANT_LENGTH),
    ],
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_the_whole_loss_is_trls_in_value_and_gradient(
    trl: Any, seed: int, loss_type: str, method: Aggregation, kl_coef: float
) -> None:
    batch = random_ragged(seed, spread=0.3, broken=False)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    expected = trl_loss(trl, batch, theirs, loss_type=loss_type, beta=kl_coef, epsilon_high=0.28)
    losses = clipped(loss_tokens(batch, ours), clip_low=0.2, clip_high=0.28).losses
    if kl_coef:
        # TRL's option of this name differentiates the ratio of the penalty, as the divergence's gradient demands.
        weights = (ours - batch.packed("old")).exp().detach()
        losses = losses + kl_coef * kl_penalty(ours, batch.packed("reference"), weights)
    assert_same(batch, aggregated(losses, batch, method), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_off_policy_mask_is_trls(trl: Any, seed: int) -> None:
    batch = random_ragged(seed, spread=0.3, broken=False)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    expected = trl_loss(trl, batch, theirs, off_policy_max_kl=0.05)
    tokens = loss_tokens(batch, ours)
    kept = off_policy_mask(ours, tokens.old_logprobs, tokens.advantages, tokens.sequence_ids, tokens.n_sequences, 0.05)
    losses = clipped(tokens).losses * kept
    assert_same(batch, aggregated(losses, batch, Aggregation.TOKEN_MEAN), ours, expected, theirs)


def test_the_deviation_of_the_batch_is_trls_scale_of_rewards(trl: Any) -> None:
    """TRL's own lines are inside a method of 400 lines, so its nanstd is called as that method calls it."""
    rewards, ids = random_rewards(0)
    means = torch.stack([rewards[ids == i].mean() for i in ids])
    expected = (rewards - means) / (oracle("trl.trainer.utils").nanstd(rewards) + 1e-4)
    ours = ADVANTAGE_FUNCTIONS["batch_std"](Outcomes(rewards, ids, torch.ones(24).long(), eps=1e-4))
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


def assert_same(batch: Ragged, ours: Tensor, our_input: Tensor, theirs: Tensor, their_input: Tensor) -> None:
    """Equal loss, and equal gradient at every token."""
    torch.testing.assert_close(ours, theirs, **CLOSE)
    (gradient,) = torch.autograd.grad(ours, our_input)
    (expected,) = torch.autograd.grad(theirs, their_input)
    torch.testing.assert_close(gradient, batch.unpadded(expected), **CLOSE)
    assert expected[~batch.mask.bool()].abs().sum() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_divergence_from_a_teacher_is_trls_in_value_and_gradient(beta: float, temperature: float) -> None:
    theirs = oracle("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    draw = torch.Generator().manual_seed(0)
    hidden, weight, teacher_hidden, teacher_weight = (
        torch.randn(*shape, generator=draw) / 3 for shape in ((40, 16), (300, 16), (40, 24), (300, 24))
    )
    weights = torch.rand(40, generator=draw)
    results = []
    for is_theirs in (True, False):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_theirs:
            values, _ = theirs.apply(states, head, None, teacher_hidden, teacher_weight, None, beta, temperature)
            total = weights @ values
        else:
            total = divergence(states, head, Lesson(teacher_hidden, teacher_weight, weights, beta), temperature)
        results.append((total, *torch.autograd.grad(total, (states, head))))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-6)


# --- GAE and the critic ----------------------------------------------------------------------------------------------


def padded(batch: Ragged, packed: Tensor) -> Tensor:
    """[S, L], 1.25 where there is no token."""
    matrix = torch.full(batch.mask.shape, 1.25, dtype=torch.float64)
    matrix[batch.mask.bool()] = packed.double()
    return matrix


def random_episode(seed: int) -> tuple[Ragged, Tensor, Tensor, Tensor]:
    """Return a batch with rewards, values and a loss mask [N]: a reward a sampled token, none at an observation."""
    batch = random_ragged(seed)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(batch.lengths), dtype=torch.float64, generator=generator)
    loss_mask = torch.rand(len(rewards), generator=generator) < 0.7
    return batch, rewards * loss_mask, values, loss_mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.9, 0.0)])
def test_advantages_and_returns_are_verls(verl: Any, seed: int, gamma: float, lam: float) -> None:
    batch, rewards, values, loss_mask = random_episode(seed)
    response_mask = padded(batch, loss_mask) * batch.mask
    expected, returns = verl.compute_gae_advantage_return(
        padded(batch, rewards) * batch.mask, padded(batch, values), response_mask, gamma, lam
    )
    advantages = gae.generalized_advantages(rewards, values, batch.sequence_ids, loss_mask, gamma, lam)
    targets = gae.value_targets(advantages, values)
    torch.testing.assert_close(targets[loss_mask], batch.unpadded(returns)[loss_mask], **CLOSE)
    ours = gae.whitened(advantages, loss_mask)
    torch.testing.assert_close(ours[loss_mask], batch.unpadded(expected)[loss_mask], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_the_value_loss_is_verls_in_value_and_gradient(verl: Any, seed: int, clip: float) -> None:
    batch, returns, old, loss_mask = random_episode(seed)
    noise = torch.Generator().manual_seed(seed + 100)
    values = old + 0.4 * torch.randn(len(old), dtype=torch.float64, generator=noise)
    theirs, ours = padded(batch, values).requires_grad_(), values.clone().requires_grad_()
    response_mask = padded(batch, loss_mask) * batch.mask
    expected, fraction = verl.compute_value_loss(
        theirs, padded(batch, returns), padded(batch, old), response_mask, cliprange_value=clip
    )
    losses, is_clipped = gae.value_loss(ours, old, returns, clip)
    loss = losses[loss_mask].sum() / loss_mask.sum()
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(is_clipped[loss_mask].double().mean(), fraction.double(), **CLOSE)
    (gradient,) = torch.autograd.grad(loss, ours)
    (their_gradient,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(gradient, batch.unpadded(their_gradient), **CLOSE)
