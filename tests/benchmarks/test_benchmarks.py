"""The arithmetic of benchmarks, where an error would give a wrong number and no failure, and their experiments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu import SHAPES, noise, write
from benchmarks.job import ROOT, with_gpus
from benchmarks.results import figures
from benchmarks.results.__main__ import KEPT, prepared, trl_options, write_questions
from benchmarks.results.experiments import EXPERIMENTS, TINY, TRL, runs
from local_runner import spec
from local_runner.checks import READERS
from services.data_server.settings import DataSettings
from trainer.capacity.shape import CONFIGS
from trainer.config import TrainerSettings

TINY_SHAPE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
TINY_SHAPE |= {"layer_types": None}
COLUMNS = {"task", "variant", "seed", "settings", "rewards", "tokens", "seconds", "accuracy", "accuracy_error"}
COLUMNS |= {"prompts", "samples", "processor_seconds", "processor", "figures"}


def row(variant: str, seed: int, rewards: list[float], accuracy: float | None = None) -> dict[str, Any]:
    ten = [10] * len(rewards)
    return {"task": "t", "variant": variant, "seed": seed, "rewards": rewards, "tokens": ten, "seconds": ten} | {
        "accuracy": accuracy,
        "processor": "p",
        "processor_seconds": 3.0,
        "figures": {"share": 0.5},
        "prompts": 20,
    }


def test_an_interval_is_students() -> None:
    assert figures.t_quantile(0.975, 4) == pytest.approx(2.7764, abs=1e-3)
    mean, low, high = figures.interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-3)


def test_only_runs_of_one_seed_on_one_processor_are_compared() -> None:
    base = [row("base", seed, [0.1 * seed]) for seed in range(4)]
    more = [row("more", seed, [0.1 * seed + 0.25]) for seed in range(4)]
    reward = figures.mean_reward
    assert figures.difference(more, base, reward) == "+0.250 (+0.250 to +0.250)"
    assert figures.difference(base, base, reward) == "identical"
    more[0]["processor"] = more[1]["processor"] = "another"
    assert figures.difference(more, base, reward) == ""


def test_a_reward_is_reached_when_three_steps_have_it_in_the_mean() -> None:
    for rewards, count in (([1.0, 1.0], None), ([0.0, 1.0, 1.0, 1.0], 4), ([0.9, 0.9, 0.9], 3), ([0.8] * 5, None)):
        assert figures.reached(row("any", 0, rewards), 0.9) == count


def test_a_table_has_a_line_for_each_variant_without_empty_columns() -> None:
    rows = {
        name: [row(name, seed, [shift, 0.5 + shift]) for seed in range(3)] for name, shift in (("a", 0), ("b", 0.5))
    }
    args = argparse.Namespace(reached=0.9, columns=["share"])
    head, _, first, second = figures.table(rows, "a", args).splitlines()
    assert "accuracy" not in head
    assert "reward minus a's" in head
    assert first.startswith("| a | 3 | 0.250 (0.250 to 0.250) |  | 0 of 3 |")
    assert "| +0.500 (+0.500 to +0.500) | 0 of 3 | 0.50 (0.50 to 0.50) | 20 | 3 |" in second


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.jsonl")), ids=lambda file: file.stem)
def test_rows_have_their_columns(file: Path) -> None:
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert all(row.keys() == COLUMNS for row in rows)
    assert len({(row["task"], row["variant"], row["seed"]) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_settings_of_an_experiment_exist(name: str) -> None:
    known = {field.upper() for reader in READERS for field in reader.settings_class().model_fields}
    known |= {"CUDA_VISIBLE_DEVICES", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS"}
    made = EXPERIMENTS[name]
    assert len({(run.task, run.variant, run.seed) for run in made}) == len(made)
    for run in made:
        assert run.settings.keys() <= known
        tasks = {task.name for task in spec.load(ROOT / run.way.job_group).tasks}
        assert run.way.nodes.keys() <= tasks
        if run.variant != TRL and run.seed == made[0].seed:
            lowered = {key.lower(): value for key, value in run.settings.items() if value}
            TrainerSettings.load(**{"teacher_model": "t"} | lowered if run.way.begins_with else lowered)


def test_trl_gets_the_prompts_of_the_run_in_their_order(tmp_path: Path) -> None:
    prompts = []
    for run in runs("tiny", TINY | {"MAX_STEPS": "2"}, range(2), {TRL: {}}):
        (tmp_path / str(run.seed)).mkdir()
        with prepared(run, tmp_path / str(run.seed)) as variables:
            lowered = {name.lower(): value for name, value in variables.items()}
        settings = TrainerSettings.load(**lowered)
        write_questions(DataSettings.load(**lowered), settings, tmp_path / "questions.jsonl")
        lines = (tmp_path / "questions.jsonl").read_bytes().splitlines()
        prompts.append([orjson.loads(line)["prompt"] for line in lines])
    assert [len(one) for one in prompts] == [2 * settings.batch_size] * 2
    assert len(set(prompts[0])) == len(prompts[0])
    assert prompts[0] != prompts[1]
    assert trl_options(settings)["adam_beta2"] == settings.adam_beta2


def test_a_random_model_has_a_published_shape_and_a_token_for_each_id(tmp_path: Path) -> None:
    assert {CONFIGS[shape][1].vocab_size for shape in SHAPES} == {151_936}
    published = CONFIGS["1.7B"][1]
    config = type(published)(**published.to_dict() | TINY_SHAPE)
    write(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (model.dtype, model.config.head_dim, len(tokenizer)) == (torch.bfloat16, 128, 300)
    assert tokenizer.decode(tokenizer.encode("1 + 2 = ä")) == "1 + 2 = ä"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert {noise(tokenizer.decode([number])) for number in range(10, 20)} == {0.0, 1.0}


def test_a_job_group_gets_the_gpus_that_a_run_has(tmp_path: Path) -> None:
    path = with_gpus(tmp_path, "jobgroup.yaml", {"rollout-server": 4, "ppo-trainer": 0})
    assert {task.name: task.gpus_per_node for task in spec.load(Path(path)).tasks if task.gpus_per_node} == {
        "rollout-server": 4
    }
