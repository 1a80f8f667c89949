"""Defaults of the trainer's settings that depend on others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from trainer.config import TrainerSettings


@pytest.mark.parametrize(
    ("mode", "given", "is_in_place"),
    [("sync", None, False), ("async", None, True), ("sync", "true", True), ("async", "false", False)],
)
def test_the_asynchronous_mode_publishes_in_place_unless_told_otherwise(
    mode: str, given: str | None, is_in_place: bool
) -> None:
    assert TrainerSettings.load(mode=mode, publish_in_place=given).publishes_in_place is is_in_place


@pytest.mark.parametrize(
    ("prompts", "given", "steps"),
    [(90, {}, 67), (90, {"max_steps": 5}, 5), (2, {"max_steps": 5}, 1), (2, {"batch_size": 6}, 1)],
)
def test_a_run_has_the_steps_of_its_epochs_or_fewer(prompts: int, given: dict[str, Any], steps: int) -> None:
    assert TrainerSettings.load(**given).total_steps(prompts) == steps


@pytest.mark.parametrize(
    ("batch_size", "steps_taken", "prompts_used", "steps"),
    [(4, 50, 200, 75), (8, 50, 200, 62), (4, 50, 230, 75), (2, 0, 0, 150)],
)
def test_after_some_steps_another_batch_size_divides_the_prompts_that_are_left(
    batch_size: int, steps_taken: int, prompts_used: int, steps: int
) -> None:
    settings = TrainerSettings.load(batch_size=batch_size)
    assert settings.total_steps(100, steps_taken, prompts_used) == steps


def test_prompts_too_few_for_a_step_are_refused() -> None:
    told = (
        "BATCH_SIZE is 4, but the data have 1 prompt to train on, 3 in NUM_EPOCHS=3: not one step; set BATCH_SIZE=1, or"
    )
    with pytest.raises(ConfigurationError, match=told):
        TrainerSettings.load().total_steps(1)


@pytest.mark.parametrize(("tokens", "seconds"), [(512, 600), (32_768, 3276.8)])
def test_long_completions_have_time_in_proportion(tokens: int, seconds: float) -> None:
    assert TrainerSettings.load(max_new_tokens=tokens).generation_deadline_seconds == seconds


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"mode": "async"}, "set MODE=sync"),
        ({"publish_transport": "broadcast"}, "set PUBLISH_TRANSPORT=disk"),
        ({"publish_transport": "broadcast", "lora_rank": 4}, None),
        ({}, None),
    ],
)
def test_engines_that_share_the_trainers_gpu_sleep_between_generations(
    settings: dict[str, Any], remedy: str | None
) -> None:
    refusal = nullcontext() if remedy is None else pytest.raises(ConfigurationError, match=remedy)
    with refusal:
        TrainerSettings.load(engine_sleeps=True, **settings)
    TrainerSettings.load(**settings)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"lora_rank": 4}, "LORA_RANK is 4, .*, or unset PUBLISH_DELTA"),
        ({"publish_transport": "broadcast"}, "PUBLISH_TRANSPORT=broadcast sends whole weights; set it to disk"),
        ({"publish_transport": "local"}, "PUBLISH_TRANSPORT=local sends"),
        ({"publish_type": "float32"}, "set PUBLISH_TYPE=bfloat16"),
        ({"mode": "async"}, None),
    ],
)
def test_deltas_are_of_whole_weights_on_the_volume(settings: dict[str, Any], remedy: str | None) -> None:
    with nullcontext() if remedy is None else pytest.raises(ConfigurationError, match=remedy):
        TrainerSettings.load(publish_delta=True, **settings)


def test_adapters_are_not_shared_in_memory() -> None:
    with pytest.raises(ConfigurationError, match=r"LORA_RANK is 4.*set PUBLISH_TRANSPORT=broadcast"):
        TrainerSettings.load(publish_transport="local", lora_rank=4)
    TrainerSettings.load(publish_transport="local", engine_sleeps=True)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"target_accuracy": 0.9}, "set EVAL_EVERY, or unset TARGET_ACCURACY"),
        ({"target_accuracy": 0.9, "eval_every": 5, "eval_prompts": 0}, "set EVAL_PROMPTS, or unset TARGET_ACCURACY"),
        ({"target_accuracy": 0.9, "eval_every": 5}, None),
        ({"importance_cap": 3, "importance_correction": "none"}, "unset IMPORTANCE_CAP"),
        ({"importance_cap": 3, "loss": "cispo"}, "set CLIP_HIGH instead"),
        ({"importance_cap": 3, "loss": "cispo", "updates_per_batch": 2}, None),
        ({"importance_cap": 3}, None),
        ({"group_size": 1}, "GROUP_SIZE is 1, but ADVANTAGE=grpo"),
        ({"group_size": 1, "mode": "async", "advantage": "pass_at_k"}, "GROUP_SIZE is 1, but ADVANTAGE=pass_at_k"),
        ({"group_size": 1, "mode": "async", "collector_in_process": False}, None),
        ({"group_size": 1, "advantage": "reinforce"}, None),
        ({"group_size": 1, "advantage": "gae"}, None),
        ({"group_size": 1, "advantage": "maxrl"}, "GROUP_SIZE is 1, but ADVANTAGE=maxrl"),
        ({"advantage": "maxrl"}, None),
        ({"advantage": "maxrl", "overlong_buffer": 8}, "OVERLONG_BUFFER is set, but ADVANTAGE=maxrl"),
        ({"advantage": "maxrl", "kl_in_reward": True, "kl_coef": 0.1}, "KL_IN_REWARD is set, but ADVANTAGE=maxrl"),
        ({"advantage": "maxrl", "over_limit_reward": -1}, "OVER_LIMIT_REWARD is set, but ADVANTAGE=maxrl"),
        (
            {"advantage": "maxrl", "credit": "turn", "rollout": "environment"},
            "CREDIT is set, but ADVANTAGE=maxrl",
        ),
        ({"advantage": "gdpo", "overlong_buffer": 8}, "OVERLONG_BUFFER is set, but ADVANTAGE=gdpo"),
        ({"advantage": "gdpo", "kl_in_reward": True, "kl_coef": 0.1}, "KL_IN_REWARD is set, but ADVANTAGE=gdpo"),
        ({"advantage": "gdpo", "over_limit_reward": -1, "kl_coef": 0.1}, None),
        ({"group_size": 1, "advantage": "gdpo"}, "GROUP_SIZE is 1, but ADVANTAGE=gdpo"),
        ({"advantage": "gdpo", "gdpo_weights": "math=1, my.module:length=-0.5"}, None),
        ({"advantage": "gdpo", "gdpo_weights": "math"}, "GDPO_WEIGHTS is 'math'"),
        ({"advantage": "gdpo", "gdpo_weights": "math=1,math=2"}, "GDPO_WEIGHTS is 'math=1,math=2'"),
        ({"advantage": "gdpo", "gdpo_weights": "math=0"}, "GDPO_WEIGHTS is 'math=0'"),
        ({"gdpo_weights": "math=1"}, "unset it, or set ADVANTAGE=gdpo"),
        ({"advantage": "rae", "credit": "turn", "rollout": "environment"}, "CREDIT is set, but ADVANTAGE=rae"),
        ({"advantage": "rae", "group_size": 1}, None),
        ({"drop_equal_groups": True, "teacher_model": "some/model"}, "DROP_EQUAL_GROUPS is set, but a teacher"),
        ({"loss": "dppo_kl", "dual_clip": 3}, "DUAL_CLIP has no effect with LOSS=dppo_kl"),
    ],
)
def test_a_setting_that_could_have_no_effect_is_refused(settings: dict[str, Any], remedy: str | None) -> None:
    with nullcontext() if remedy is None else pytest.raises(ConfigurationError, match=remedy):
        TrainerSettings.load(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_high": 0.3}, "CLIP_HIGH has no effect with one update a batch"),
        ({"loss": "gspo", "clip_low": 0.1, "clip_high": 0.3}, "CLIP_LOW, CLIP_HIGH have no effect"),
        ({"dual_clip": 3, "mode": "async"}, "DUAL_CLIP has no effect"),
        ({"clip_high": 0.3, "updates_per_batch": 2}, None),
        ({"clip_high": 0.3, "epochs_per_batch": 2}, None),
        ({"clip_high": 0.3, "importance_correction": "none"}, None),
        ({"clip_high": 3, "loss": "cispo"}, None),
        ({"clip_high": 3, "loss": "my:loss"}, None),
        ({"clip_high": 0.1, "loss": "dppo_tv"}, None),
        ({"lora_rank": 8}, "LORA_RANK is set, but LEARNING_RATE is the whole model's default, 1e-06"),
        ({"lora_rank": 8, "learning_rate": 1e-6}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_setting_that_is_hardly_meant_is_named(settings: dict[str, Any], said: str | None) -> None:
    cautions = TrainerSettings.load(**settings).cautions
    assert len(cautions) == (said is not None)
    assert all(str(said) in caution for caution in cautions)
