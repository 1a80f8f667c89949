"""Misspelt variables and values that are not allowed are found before anything starts."""

import os
from pathlib import Path

import pytest
import typer

from scripts import run_local

ROOT = Path(__file__).parents[2]


def dry_run(*env: str, job_group: str = "jobgroup.yaml", **options) -> None:
    with pytest.raises(typer.Exit) as ended:
        run_local.main(ROOT / job_group, env=list(env), dry_run=True, **options)
    assert ended.value.exit_code in (0, 78)
    if ended.value.exit_code:
        raise SystemExit(78)


def refused(capfd, *env: str, **options) -> str:
    with pytest.raises(SystemExit):
        dry_run(*env, **options)
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("BATCHSIZE=3", "BATCHSIZE is read by no component; the nearest setting is BATCH_SIZE"),
        ("SGLANG_TP_SIZ=2", "the nearest setting is SGLANG_TP_SIZE"),
        ("MY_THRESHOLD=2", "declare it under `envs` of its task"),
        ("EVAL_SPLIT=test", "EVAL_SPLIT is read by evaluate alone, which job group grpo does not have"),
        ("BATCH_SIZE=two", "ppo-trainer: BATCH_SIZE is 'two': Input should be a valid integer"),
        ("REWARD_FN=maths", "reward-server: REWARD_FN is 'maths'"),
        ("UPDATES_PER_BATCH=9", "UPDATES_PER_BATCH is 9; allowed is at most BATCH_SIZE (4)"),
        ("SGLANG_TP_SIZE=3", "rollout-server: an engine needs 3 GPUs"),
        ("LOG_LEVEL=loud", "ppo-trainer, data-server, rollout-server, reward-server, replay-buffer: LOG_LEVEL"),
    ],
)
def test_variables_that_no_component_accepts_are_refused(capfd, given, said):
    assert said in refused(capfd, given)


def test_all_errors_are_reported_at_once(capfd):
    said = refused(capfd, "BATCH_SIZE=0", "REWARD_FN=maths")
    assert "BATCH_SIZE is '0'" in said
    assert "REWARD_FN is 'maths'" in said


def test_variables_of_libraries_and_components_pass(tmp_path):
    dry_run("NCCL_DEBUG=INFO", "HF_HUB_OFFLINE=1", "SGLANG_ENABLE_TORCH_COMPILE=1", "https_proxy=", "MAX_STEPS=3")
    # A file of settings may serve an evaluation of the run, too.
    settings = tmp_path / "settings.env"
    settings.write_text("MAX_STEPS=3\nEVAL_SPLIT=test\n")
    dry_run(env_file=[settings])
    dry_run(env_file=[settings], job_group="evaluation/evaluate.yaml")


def test_an_evaluation_takes_the_settings_of_its_questions() -> None:
    dry_run("DATASET=arithmetic", "PROMPT_STYLE=plain", "REWARD_FN=math", job_group="evaluation/evaluate.yaml")


def test_variables_that_the_file_declares_pass(tmp_path, capfd):
    document = (ROOT / "jobgroup.yaml").read_text()
    group = tmp_path / "group.yaml"
    group.write_text(document.replace("  REWARD_FN: math\n", "  REWARD_FN: math\n  MY_THRESHOLD: 1\n"))
    dry_run("MY_THRESHOLD=2", job_group=str(group))
    assert "the nearest setting is MY_THRESHOLD" in refused(capfd, "MY_TRESHOLD=2", job_group=str(group))


def test_the_environment_of_this_process_is_checked_and_left_alone(monkeypatch, capfd):
    monkeypatch.setenv("GROUP_SIZE", "many")
    assert "GROUP_SIZE is 'many'" in refused(capfd)
    monkeypatch.setenv("GROUP_SIZE", "4")
    dry_run("GROUP_SIZE=2")
    assert "SKYPILOT_NODE_RANK" not in os.environ
