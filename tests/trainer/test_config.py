"""The trainer's settings: defaults that depend on others, and what does not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import ConfigurationError
from tests.tolerance import BOTH_TYPES
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


AGENT = {"rollout": "agent", "agent": "a:b"}
PROGRAM = {"rollout": "program", "agent_command": "x"}
TEACHER = {"teacher_model": "m"}
TURNS = {"credit": "turn", "rollout": "environment"}
KL_IN_REWARD = {"kl_in_reward": True, "kl_coef": 0.1}

REFUSED: list[tuple[dict[str, Any], str]] = [
    # Engines on the trainer's GPU, transports
    ({"engine_sleeps": True, "mode": "async"}, "MODE=sync"),
    ({"engine_sleeps": True, "publish_transport": "broadcast"}, "PUBLISH_TRANSPORT=disk"),
    ({"publish_transport": "local", "lora_rank": 4}, "LORA_RANK is 4.*PUBLISH_TRANSPORT=broadcast"),
    ({"compute_type": "bfloat16", "publish_type": "float32"}, "PUBLISH_TYPE is float32.*COMPUTE_TYPE=float32"),
    # Settings that could have no effect
    ({"target_accuracy": 0.9}, "EVAL_EVERY.*TARGET_ACCURACY"),
    ({"target_accuracy": 0.9, "eval_every": 5, "eval_prompts": 0}, "EVAL_PROMPTS.*TARGET_ACCURACY"),
    ({"importance_cap": 3, "importance_correction": "none"}, "IMPORTANCE_CAP"),
    ({"importance_cap": 3, "loss": "cispo"}, "CLIP_HIGH"),
    ({"loss": "dppo_kl", "dual_clip": 3}, "DUAL_CLIP .*LOSS=dppo_kl"),
    ({"loss": "gspo", "dual_clip": 3}, "DUAL_CLIP .*LOSS=gspo"),
    ({"loss": "sapo", "clip_low": 0.1}, "CLIP_LOW .*LOSS=sapo"),
    ({"loss": "clippd"}, "LOSS is 'clippd'.*clipped"),
    ({"advantage": "gpro"}, "ADVANTAGE is 'gpro'.*grpo"),
    ({"advantage": "grpo", "gamma": 0.9, "critic_warmup_steps": 1}, "GAMMA, CRITIC_WARMUP_STEPS .*ADVANTAGE=grpo"),
    # Groups of one, and formulas
    ({"group_size": 1}, "GROUP_SIZE is 1.*ADVANTAGE=grpo"),
    ({"group_size": 1, "mode": "async", "advantage": "pass_at_k"}, "GROUP_SIZE is 1.*ADVANTAGE=pass_at_k"),
    ({"group_size": 1, "advantage": "maxrl"}, "GROUP_SIZE is 1.*ADVANTAGE=maxrl"),
    ({"group_size": 1, "advantage": "gdpo"}, "GROUP_SIZE is 1.*ADVANTAGE=gdpo"),
    ({"group_size": 1, **TEACHER}, "GROUP_SIZE is 1"),
    ({"advantage": "maxrl", "overlong_buffer": 8}, "OVERLONG_BUFFER .*ADVANTAGE=maxrl"),
    ({"advantage": "maxrl", **KL_IN_REWARD}, "KL_IN_REWARD .*ADVANTAGE=maxrl"),
    ({"advantage": "maxrl", "over_limit_reward": -1}, "OVER_LIMIT_REWARD .*ADVANTAGE=maxrl"),
    ({"advantage": "maxrl", **TURNS}, "CREDIT .*ADVANTAGE=maxrl"),
    ({"advantage": "rae", **TURNS}, "CREDIT .*ADVANTAGE=rae"),
    ({"credit": "turn"}, "CREDIT is turn.*one turn"),
    ({"advantage": "gdpo", "overlong_buffer": 8}, "OVERLONG_BUFFER .*ADVANTAGE=gdpo"),
    ({"advantage": "gdpo", **KL_IN_REWARD}, "KL_IN_REWARD .*ADVANTAGE=gdpo"),
    ({"advantage": "gdpo", "gdpo_weights": "math"}, "GDPO_WEIGHTS is 'math'"),
    ({"advantage": "gdpo", "gdpo_weights": "math=1,math=2"}, "GDPO_WEIGHTS is 'math=1,math=2'"),
    ({"advantage": "gdpo", "gdpo_weights": "math=0"}, "GDPO_WEIGHTS is 'math=0'"),
    ({"gdpo_weights": "math=1"}, "GDPO_WEIGHTS.*ADVANTAGE=gdpo"),
    # Teachers
    ({"drop_equal_groups": True, **TEACHER}, "DROP_EQUAL_GROUPS"),
    ({**TEACHER, "model_name": "m"}, "the student"),
    ({**TEACHER, "teacher_url": "http://t:1"}, "TEACHER_MODEL.*TEACHER_URL|TEACHER_URL.*TEACHER_MODEL"),
    ({"teacher_url": "t:1"}, "TEACHER_URL"),
    ({"teacher_url": "http://t:1", "temperature": 0.7}, "TEMPERATURE=1"),
    ({"teacher_url": "http://t:1", "teacher_jsd_beta": 0.5}, "TEACHER_JSD_BETA"),
    ({"reward_weight": 0}, "REWARD_WEIGHT"),
    ({"reward_weight": 0, **TEACHER, "dynamic_sampling_tries": 2}, "DYNAMIC_SAMPLING_TRIES"),
    ({"reward_weight": 0, **TEACHER, "advantage": "gae"}, "ADVANTAGE"),
    # METHOD=sft
    ({"method": "sft", "mode": "async"}, "MODE .*METHOD=sft"),
    ({"method": "sft", "advantage": "rloo", "kl_coef": 0.1}, "ADVANTAGE, KL_COEF"),
    ({"method": "sft", **TEACHER, "reward_weight": 0}, "REWARD_WEIGHT, TEACHER_MODEL"),
    ({"method": "sft", "replay_groups": 2}, "REPLAY_GROUPS"),
    ({"method": "sft", "dynamic_sampling_tries": 2}, "DYNAMIC_SAMPLING_TRIES"),
    # Ways of rolling out
    ({**AGENT, "agent": ""}, "AGENT is ''.*ROLLOUT is agent"),
    ({**AGENT, "agent_command": "x"}, "AGENT_COMMAND is 'x'.*ROLLOUT=program"),
    ({**PROGRAM, "agent": "a:b"}, "ROLLOUT is program.*ROLLOUT=agent"),
    ({**PROGRAM, "agent_command": " "}, "AGENT_COMMAND is empty.*ROLLOUT is program"),
    ({**AGENT, "rollout": "completion"}, "ROLLOUT is completion.*ROLLOUT=agent"),
    ({**AGENT, "agent_max_tokens": 8}, "AGENT_MAX_TOKENS is 8.*MAX_NEW_TOKENS"),
    ({**AGENT, "overlong_buffer": 2}, "OVERLONG_BUFFER .*ROLLOUT is agent"),
    ({**AGENT, "group_size": 1024, "agent_max_turns": 65}, "GROUP_SIZE times AGENT_MAX_TURNS is 66560"),
    ({"rollout": "environment", "opponent": "version:3"}, "OPPONENT.*`self`"),
    ({"opponent": "http://127.0.0.1:9"}, "OPPONENT.*ROLLOUT=environment"),
    # Values
    *(({"profile_steps": steps}, "PROFILE_STEPS") for steps in ("0", "3:2", "1:", "a", "1:2:3", "-1")),
    *(({"record_groups": steps}, f"RECORD_GROUPS is '{steps}'") for steps in ("0", "-3", "some", "1.5", "10 steps")),
]
ACCEPTED: list[dict[str, Any]] = [
    {"engine_sleeps": True},
    {"engine_sleeps": True, "publish_transport": "broadcast", "lora_rank": 4},
    {"engine_sleeps": True, "publish_transport": "local"},
    *({"compute_type": "float32", "publish_type": kind} for kind in BOTH_TYPES),
    {"compute_type": "bfloat16", "save_type": "float32"},
    {"target_accuracy": 0.9, "eval_every": 5},
    {"importance_cap": 3},
    {"importance_cap": 3, "loss": "cispo", "updates_per_batch": 2},
    {"group_size": 1, "mode": "async", "collector_in_process": False},
    {"group_size": 1, "advantage": "reinforce"},
    {"group_size": 1, "advantage": "gae", **TURNS},
    {"group_size": 1, "advantage": "rae"},
    {"group_size": 1, **TEACHER, "reward_weight": 0},
    {"advantage": "maxrl"},
    {"advantage": "gdpo", "over_limit_reward": -1, "kl_coef": 0.1},
    {"advantage": "gdpo", "gdpo_weights": "math=1, my.module:length=-0.5"},
]


def test_settings_that_do_not_fit_each_other_are_refused_by_name() -> None:
    for settings, named in REFUSED:
        with pytest.raises(ConfigurationError, match=named):
            pytest.fail(f"{TrainerSettings.load(**settings).run_id} has {settings}, {named}")


@pytest.mark.parametrize(("publish_type", "wanted"), [("float32", "float32"), ("bfloat16", "auto")])
def test_a_policy_that_is_published_in_float32_is_computed_in_float32(publish_type: str, wanted: str) -> None:
    assert TrainerSettings.load(compute_type="auto", publish_type=publish_type).wanted_compute == wanted


def test_settings_that_fit_are_accepted() -> None:
    for settings in ACCEPTED:
        TrainerSettings.load(**settings)


@pytest.mark.leaving
def test_deltas_are_of_whole_weights_on_the_volume() -> None:
    for settings, named in (
        ({"lora_rank": 4}, "LORA_RANK is 4.*PUBLISH_DELTA"),
        ({"publish_transport": "broadcast"}, "PUBLISH_TRANSPORT=broadcast"),
        ({"publish_transport": "local"}, "PUBLISH_TRANSPORT=local"),
        ({"publish_type": "float32"}, "PUBLISH_TYPE=bfloat16"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            TrainerSettings.load(publish_delta=True, **settings)
    TrainerSettings.load(publish_delta=True, mode="async")


@pytest.mark.parametrize(("value", "kept"), [("off", "off"), ("all", "all"), ("12", 12), ("", None)])
def test_steps_to_record_are_read(value: str, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORD_GROUPS", value)
    assert TrainerSettings.load().record_groups == kept


CAUTIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"clip_high": 0.3}, "CLIP_HIGH"),
    ({"loss": "gspo", "clip_low": 0.1, "clip_high": 0.3, "importance_correction": "sequence"}, "CLIP_LOW, CLIP_HIGH"),
    ({"loss": "gspo"}, "LOSS=gspo"),
    ({"loss": "gspo", "importance_correction": "icepop", "updates_per_batch": 2}, "LOSS=gspo"),
    ({"loss": "gspo", "importance_correction": "none"}, None),
    ({"drop_equal_groups": True, "kl_coef": 0.1}, "DROP_EQUAL_GROUPS"),
    ({"drop_equal_groups": True, "entropy_coef": 0.1}, "DROP_EQUAL_GROUPS"),
    ({"drop_equal_groups": True, "advantage": "gae", "critic": "shared"}, "DROP_EQUAL_GROUPS"),
    ({"drop_equal_groups": True, "advantage": "gae"}, None),
    ({"drop_equal_groups": True, **KL_IN_REWARD}, None),
    ({"dual_clip": 3, "mode": "async"}, "DUAL_CLIP"),
    ({"clip_high": 0.3, "updates_per_batch": 2}, None),
    ({"clip_high": 0.3, "epochs_per_batch": 2}, None),
    ({"clip_high": 0.3, "importance_correction": "none"}, None),
    ({"clip_high": 3, "loss": "cispo"}, None),
    ({"clip_high": 3, "loss": "my:loss"}, None),
    ({"clip_high": 0.1, "loss": "dppo_tv"}, None),
    ({"lora_rank": 8}, "LORA_RANK is set, but LEARNING_RATE"),
    ({"lora_rank": 8, "learning_rate": 1e-6}, None),
    ({"teacher_coef": 2}, "TEACHER_COEF"),
    ({}, None),
]


def test_the_weight_of_a_token_has_the_bound_of_its_loss() -> None:
    for given, cap in (
        ({"loss": "dppo_tv"}, 20),
        ({"loss": "dppo_kl"}, 20),
        ({"loss": "dppo_tv", "importance_cap": 3}, 3),
        ({"loss": "dppo_kl", "importance_correction": "sequence"}, None),
        ({"loss": "my:loss"}, None),
        ({}, None),
    ):
        assert TrainerSettings.load(**given).loss_importance_cap == cap, given


def test_a_setting_that_is_hardly_meant_is_named() -> None:
    for settings, named in CAUTIONS:
        cautions = TrainerSettings.load(**settings).cautions
        assert [caution.startswith(str(named)) for caution in cautions] == [True] * (named is not None), settings
