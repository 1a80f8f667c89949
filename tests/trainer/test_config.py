"""The trainer's settings: defaults that depend on others, and what does not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from local_runner.spec import env_file
from scripts.launch.plan import ROOT
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from tests.tolerance import BOTH_TYPES
from trainer.config import TrainerSettings


@pytest.mark.parametrize(
    ("given", "taken", "steps"),
    [
        ({}, (90,), 67),
        ({"max_steps": 5}, (90,), 5),
        ({"max_steps": 5}, (2,), 1),
        ({"batch_size": 6}, (2,), 1),
        # After some steps another batch size divides the prompts that are left.
        ({"batch_size": 4}, (100, 50, 200), 75),
        ({"batch_size": 8}, (100, 50, 200), 62),
        ({"batch_size": 4}, (100, 50, 230), 75),
        ({"batch_size": 2}, (100, 0, 0), 150),
    ],
)
def test_a_run_has_the_steps_of_its_epochs_or_fewer(given: dict[str, Any], taken: tuple[int, ...], steps: int) -> None:
    assert TrainerSettings.load(**given).total_steps(*taken) == steps


def test_prompts_too_few_for_a_step_are_refused() -> None:
    told = (
        "BATCH_SIZE is 4, but the data have 1 prompt to train on, 3 in NUM_EPOCHS=3: not one step; set BATCH_SIZE=1, or"
    )
    with pytest.raises(ConfigurationError, match=told):
        TrainerSettings.load().total_steps(1)


AGENT = {"rollout": "agent", "agent": "a:b"}
PROGRAM = {"rollout": "program", "agent_command": "x"}
TEACHER = {"teacher_model": "m"}
TURNS = {"credit": "turn", "rollout": "environment"}
LONG, CISPO = {"overlong_buffer": 8}, {"loss": "cispo"}
KL_IN_REWARD = {"kl_in_reward": True, "kl_coef": 0.1}

REFUSED: dict[str, list[dict[str, Any]]] = {
    # Variables of a choice that was not made
    "TARGET_ACCURACY": [{"target_accuracy": 0.9}, {"target_accuracy": 0.9, "eval_every": 5, "eval_prompts": 0}],
    "CRITIC_WARMUP_STEPS": [{"critic_warmup_steps": 1}],
    "VALUE_COEF": [{"advantage": "gae", "value_coef": 1}],
    "GDPO_WEIGHTS": [
        {"gdpo_weights": "math=1"},
        *({"advantage": "gdpo", "gdpo_weights": weights} for weights in ("math", "math=1,math=2", "math=0")),
    ],
    "TEACHER_JSD_BETA": [{"teacher_url": "http://t:1", "teacher_jsd_beta": 0.5}],
    "TEACHER_COEF": [{"teacher_coef": 2}],
    "MAX_STALENESS": [{"max_staleness": 2}],
    "REPLAY_MAX_KL": [{"replay_max_kl": 1}],
    "LORA_ALPHA": [{"lora_alpha": 8}],
    "MODE": [{"method": "sft", "mode": "async"}],
    "KL_COEF": [{"method": "sft", "kl_coef": 0.1}],
    "DYNAMIC_SAMPLING_TRIES": [{"reward_weight": 0, **TEACHER, "dynamic_sampling_tries": 2}],
    "ADVANTAGE": [{"advantage": "gpro"}, {"reward_weight": 0, **TEACHER, "advantage": "gae"}],
    "REWARD_WEIGHT": [{"reward_weight": 0}, {"method": "sft", "reward_weight": 0}],
    "AGENT": [AGENT | {"agent": ""}, PROGRAM | {"agent": "a:b"}, {"agent": "a:b"}],
    "AGENT_COMMAND": [AGENT | {"agent_command": "x"}, PROGRAM | {"agent_command": " "}],
    "OPPONENT": [{"opponent": "http://127.0.0.1:9"}, {"rollout": "environment", "opponent": "version:3"}],
    # Contradictions
    "ENGINE_SLEEPS": [
        *({"engine_sleeps": True, **other} for other in ({"mode": "async"}, {"publish_transport": "broadcast"})),
        {"engine_sleeps": True, "method": "sft"},
    ],
    "PUBLISH_TRANSPORT": [{"publish_transport": "local", "lora_rank": 4}],
    "PUBLISH_TYPE": [{"compute_type": "bfloat16", "publish_type": "float32"}],
    "IMPORTANCE_CAP": [{"importance_cap": 3, **other} for other in ({"importance_correction": "none"}, CISPO)],
    "DUAL_CLIP": [{"loss": loss, "dual_clip": 3} for loss in ("dppo_kl", "gspo")],
    "CLIP_LOW": [{"loss": "sapo", "clip_low": 0.1}],
    "LOSS": [{"loss": "clippd"}],
    "GROUP_SIZE": [
        *({"group_size": 1, "advantage": name} for name in ("grpo", "pass_at_k", "maxrl", "gdpo")),
        *({"group_size": 1, **other} for other in ({"mode": "async"}, TEACHER)),
        {**AGENT, "group_size": 1024, "agent_max_turns": 65},
    ],
    "OVERLONG_BUFFER": [AGENT | LONG, *({"advantage": name, **LONG} for name in ("maxrl", "gdpo"))],
    "KL_IN_REWARD": [{"kl_in_reward": True}, *({"advantage": name, **KL_IN_REWARD} for name in ("maxrl", "gdpo"))],
    "OVER_LIMIT_REWARD": [{"advantage": "maxrl", "over_limit_reward": -1}],
    "CREDIT": [{"credit": "turn"}, *({"advantage": name, **TURNS} for name in ("maxrl", "rae"))],
    "DROP_EQUAL_GROUPS": [{"drop_equal_groups": True, **TEACHER}],
    "TEACHER_MODEL": [{**TEACHER, "model_name": "m"}, {**TEACHER, "teacher_url": "http://t:1"}],
    "TEACHER_URL": [{"teacher_url": "t:1"}, {"teacher_url": "http://t:1", "temperature": 0.7}],
    "AGENT_MAX_TOKENS": [AGENT | {"agent_max_tokens": 8}],
    # Values
    "PROFILE_STEPS": [{"profile_steps": steps} for steps in ("0", "3:2", "1:", "a", "1:2:3", "-1")],
    "RECORD_GROUPS": [{"record_groups": steps} for steps in ("0", "-3", "some", "1.5", "10 steps")],
}
"""Settings that are refused, by the variable that the message begins with."""
ACCEPTED: list[dict[str, Any]] = [
    {"engine_sleeps": True},
    {"engine_sleeps": True, "publish_transport": "broadcast", "lora_rank": 4},
    {"engine_sleeps": True, "publish_transport": "local"},
    *({"compute_type": "float32", "publish_type": kind} for kind in BOTH_TYPES),
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
    for variable, cases in REFUSED.items():
        for settings in cases:
            with pytest.raises(ConfigurationError, match=rf"^{variable}\b") as refusal:
                TrainerSettings.load(**settings)
            assert refusal.value.exit_code == EXIT_CONFIGURATION


def test_settings_that_fit_are_accepted() -> None:
    for settings in ACCEPTED:
        TrainerSettings.load(**settings)


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
    ({}, None),
]


DERIVED: list[tuple[str, dict[str, Any], Any]] = [
    ("publishes_in_place", {}, False),
    ("publishes_in_place", {"mode": "async"}, True),
    ("publishes_in_place", {"publish_in_place": "true"}, True),
    ("publishes_in_place", {"mode": "async", "publish_in_place": "false"}, False),
    ("generation_deadline_seconds", {"max_new_tokens": 512}, 600),
    ("generation_deadline_seconds", {"max_new_tokens": 32_768}, 3276.8),
    ("wanted_compute", {"compute_type": "auto", "publish_type": "float32"}, "float32"),
    ("wanted_compute", {"compute_type": "auto", "publish_type": "bfloat16"}, "auto"),
    ("loss_importance_cap", {"loss": "dppo_tv"}, 20),
    ("loss_importance_cap", {"loss": "dppo_kl"}, 20),
    ("loss_importance_cap", {"loss": "dppo_tv", "importance_cap": 3}, 3),
    ("loss_importance_cap", {"loss": "dppo_kl", "importance_correction": "sequence"}, None),
    ("loss_importance_cap", {"loss": "my:loss"}, None),
    ("loss_importance_cap", {}, None),
    ("learning_rate", {}, 1e-6),
    ("learning_rate", {"lora_rank": 8}, 3e-5),
    ("learning_rate", {"lora_rank": 8, "learning_rate": 1e-6}, 1e-6),
    ("learning_rate", {"learning_rate": 2e-5}, 2e-5),
]


def test_what_is_not_set_follows_from_other_settings() -> None:
    for name, given, value in DERIVED:
        assert getattr(TrainerSettings.load(**given), name) == value, (name, given)


def test_one_gpu_takes_a_batch_of_256_completions_and_leaves_out_those_that_teach_nothing() -> None:
    preset = {name.lower(): value for name, value in env_file(ROOT / "examples/one-gpu.env").items()}
    settings = TrainerSettings.load(**preset)
    assert (settings.batch_size, settings.group_size) >= (32, 8)
    assert (settings.drop_equal_groups, settings.learning_rate, settings.cautions) == (True, 3e-5, [])
    of_file = (ROOT / "jobgroup.yaml").read_text("utf-8")
    assert [line in of_file for line in ("  NUM_EPOCHS: 3\n", "  BATCH_SIZE: 4\n")] == [True, True]


def test_a_setting_that_is_hardly_meant_is_named() -> None:
    for settings, named in CAUTIONS:
        cautions = TrainerSettings.load(**settings).cautions
        assert [caution.startswith(str(named)) for caution in cautions] == [True] * (named is not None), settings
