"""The algorithm against two libraries' own implementations, on random ragged batches: verl 0.9.1 and TRL 1.16.

They are not among the test requirements, since they pull in much that nothing else here needs: `make test-oracles`
installs them and runs this file. Where a library differs from a paper, the test says how the two are made to agree.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.ragged import Ragged, random_ragged
from trainer.algorithm import grpo
from trainer.algorithm.methods import AdvantageMethod, Aggregation, KLEstimator

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
    return grpo.aggregate(
        losses,
        batch.sequence_ids,
        batch.n_sequences,
        method,
        step_tokens=sum(batch.lengths),
        step_sequences=batch.n_sequences,
        constant_length=constant_length,
    )


def random_rewards(seed: int) -> tuple[Tensor, Tensor]:
    """[24] rewards and group ids: groups of several sizes in a shuffled order, one of equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3] * 10)[torch.randperm(24, generator=generator)]
    rewards = torch.randn(24, dtype=torch.float64, generator=generator)
    rewards[ids == 1] = 0.5
    return rewards, ids


# --- verl ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", list(AdvantageMethod))
def test_advantages_are_verls(verl: Any, seed: int, method: AdvantageMethod) -> None:
    rewards, ids = random_rewards(seed)
    arguments: dict[str, Any] = {
        "token_level_rewards": rewards[:, None].clone(),
        "response_mask": torch.ones(24, 1),
        "index": ids.numpy(),
    }
    match method:
        case AdvantageMethod.RLOO:
            expected, _ = verl.compute_rloo_outcome_advantage(**arguments)
        case _:
            by_std = method is AdvantageMethod.GRPO
            expected, _ = verl.compute_grpo_outcome_advantage(**arguments, epsilon=1e-6, norm_adv_by_std_in_grpo=by_std)
    torch.testing.assert_close(grpo.group_advantages(rewards, ids, method, eps=1e-6), expected[:, 0], **CLOSE)


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
    losses = grpo.clipped_surrogate(ours, batch.packed("old"), batch.packed("advantage"), 0.2, 0.28, dual_clip)
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
    old, advantages = batch.packed("old"), batch.packed("advantage")
    if name == "gspo":
        losses = grpo.gspo_loss(ours, old, advantages, batch.sequence_ids, batch.n_sequences, 0.05, 0.1)
    else:
        losses = grpo.cispo_loss(ours, old, advantages, 0.05, 0.1)
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
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_estimators_are_verls(verl: Any, seed: int, estimator: KLEstimator) -> None:
    batch = random_ragged(seed)
    theta, reference = batch.packed("theta"), batch.packed("reference")
    expected = verl.kl_penalty_forward(theta, reference, estimator.value)
    torch.testing.assert_close(grpo.kl_penalty(theta, reference, estimator), expected, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_are_verls(seed: int) -> None:
    batch = random_ragged(seed, spread=1.5)
    theta, behaviour = batch.packed("theta"), batch.packed("behaviour")
    log_ratio = batch.padded("theta") - batch.padded("behaviour")
    correction = oracle("verl.trainer.ppo.rollout_corr_helper")
    for threshold, ours in (
        (2.0, grpo.truncated_importance_weights(theta, behaviour, 2.0)),
        ("0.5_5.0", grpo.icepop_weights(theta, behaviour, 0.5, 5.0)),
    ):
        weights, _ = correction.compute_rollout_correction_weights(
            log_ratio, batch.mask, rollout_is="token", rollout_is_threshold=threshold
        )
        torch.testing.assert_close(ours, batch.unpadded(weights), **CLOSE)


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
    } | options
    alone = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True, is_main_process=True
    )
    trainer = SimpleNamespace(
        **{name: value for name, value in settings.items() if name != "delta"},
        args=SimpleNamespace(delta=settings["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=alone,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
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
        "advantages": batch.padded("advantage")[:, 0],
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
    losses = grpo.clipped_surrogate(ours, batch.packed("old"), batch.packed("advantage"), 0.2, 0.28)
    losses = losses + kl_coef * grpo.kl_penalty(ours, batch.packed("reference"))
    assert_same(batch, aggregated(losses, batch, method), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_decoupled_objective_is_trls_with_its_engine_correction(trl: Any, seed: int) -> None:
    batch = random_ragged(seed, spread=0.3, broken=False)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    expected = trl_loss(trl, batch, theirs, use_vllm=True)
    losses = grpo.clipped_surrogate(ours, batch.packed("old"), batch.packed("advantage"))
    losses = losses * grpo.truncated_importance_weights(batch.packed("old"), batch.packed("behaviour"), 2.0)
    assert_same(batch, aggregated(losses, batch, Aggregation.TOKEN_MEAN), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_trls_whose_bound_is_the_ratio_itself(trl: Any, seed: int) -> None:
    batch = random_ragged(seed, spread=0.3, broken=False)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    expected = trl_loss(trl, batch, theirs, loss_type="cispo", epsilon_high=1.28)
    losses = grpo.cispo_loss(ours, batch.packed("old"), batch.packed("advantage"), clip_high=0.28)
    assert_same(batch, aggregated(losses, batch, Aggregation.TOKEN_MEAN), ours, expected, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_is_trls_sequence_level_ratio(trl: Any, seed: int) -> None:
    batch = random_ragged(seed, spread=0.3, shortest=1, broken=False)
    theirs, ours = batch.padded("theta").requires_grad_(), batch.packed("theta").requires_grad_()
    expected = trl_loss(
        trl, batch, theirs, loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.1
    )
    losses = grpo.gspo_loss(
        ours, batch.packed("old"), batch.packed("advantage"), batch.sequence_ids, batch.n_sequences, 0.05, 0.1
    )
    assert_same(batch, aggregated(losses, batch, Aggregation.SEQUENCE_MEAN), ours, expected, theirs)


def test_the_overlong_penalty_is_trls() -> None:
    lengths = list(range(40))
    expected = oracle("trl.rewards").get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=12)(
        completion_ids=[[1] * n for n in lengths]
    )
    result = grpo.overlong_penalty(torch.tensor(lengths), 30, 12)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def assert_same(batch: Ragged, ours: Tensor, our_input: Tensor, theirs: Tensor, their_input: Tensor) -> None:
    """Equal loss, and equal gradient at every token."""
    torch.testing.assert_close(ours, theirs, **CLOSE)
    (gradient,) = torch.autograd.grad(ours, our_input)
    (expected,) = torch.autograd.grad(theirs, their_input)
    torch.testing.assert_close(gradient, batch.unpadded(expected), **CLOSE)
    assert expected[~batch.mask.bool()].abs().sum() == 0
