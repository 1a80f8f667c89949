"""The parts of the results page about tasks and TRL: valid settings, and figures that are those of the runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import orjson
import pytest

from benchmarks import trl_runs
from benchmarks.job import Job
from benchmarks.results import beside_trl, experiments, job_runs, mix
from benchmarks.results.runs import Result, Run
from benchmarks.results.tasks import TINY, with_model
from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings
from trainer.config import TrainerSettings

pytestmark = pytest.mark.leaving


def test_levels_come_in_order_and_all_questions_of_a_run_are_asked_once() -> None:
    for settings in experiments.TASKS.values():
        if "reasoning_gym" in settings["DATASET"]:
            assert settings["CURRICULUM"] == "source"
            asked = int(settings["MAX_STEPS"]) * int(settings["BATCH_SIZE"])
            held_out = float(settings["DATASET_HELD_OUT"])
            assert asked <= experiments.QUESTIONS * (1 - held_out) + 1
            assert int(settings["EVAL_PROMPTS"]) <= experiments.QUESTIONS * held_out + 1


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A finished run of two steps, evaluated before and after."""
    lines = [
        {"step": 1, "legal": 0.5, "reward_mean": 0.1},
        {"step": 2, "legal": None, "reward_mean": 0.2},
        {"step": 3, "legal": 0.75, "reward_mean": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (tmp_path / "summary.json").write_bytes(orjson.dumps({"accuracy_before": 0.25}))
    with subprocess.Popen(["true"]) as process:
        return Job(process, tmp_path, tmp_path / "messages.txt")


def test_figures_are_of_the_first_and_the_last_step_that_have_them(job: Job) -> None:
    assert job_runs.first_and_last(job, ["legal", "absent"]) == {"legal_before": 0.5, "legal_after": 0.75}
    assert job_runs.of_last_step(job, ["legal", "absent"]) == {"legal_after": 0.75}
    assert job_runs.accuracy_before(job) == {"accuracy_before": 0.25}


def result(task: str, seed: int, accuracy: float, **figures: float) -> Result:
    return Result(
        *(task, "GRPO", seed, {}, [0.1, 0.2, 0.3, 0.4, 0.5], [1] * 5, [1.0] * 5, accuracy, 0.05, 52),
        processor_seconds=120.0,
        figures=figures,
    )


def test_a_task_without_runs_says_so_in_its_row() -> None:
    results = [result("gcd", seed, 0.4 + seed / 10, accuracy_before=0.1) for seed in range(3)]
    assert job_runs.task_row(results, "gcd") == (
        "3 | 0.10 (0.10 to 0.10) | 0.40 (0.40 to 0.40) | 0.10 (0.10 to 0.10) | 0.50 (0.40 to 0.60) | 52 | 2 (2 to 2)"
    )
    assert job_runs.task_row(results, "countdown") == "0 | not run |  |  |  |  | "


def test_the_summary_says_in_how_many_seeds_a_task_was_learned() -> None:
    results = [result("gcd", seed, accuracy, accuracy_before=0.1) for seed, accuracy in enumerate([0.5, 0.1, 0.6])]
    results.append(result("chain_sum", 0, 0.35, accuracy_before=0.28))
    assert job_runs.learned(results) == (
        "**Learned:** gcd 0.10 to 0.50, 0.10 and 0.60 (in 2 of 3 seeds). "
        "**Not learned:** chain_sum 0.28 to 0.35 (highest reward of a step 0.50)."
    )
    assert "chain_sum" not in job_runs.learned(results, "gcd")


def test_a_gain_is_bounded_as_in_newcombes_table() -> None:
    # 9 of 10 beside 3 of 10: Statistics in Medicine 17 (1998), table II, method 10.
    assert job_runs.least_gain(0.3, 0.9, 10) == pytest.approx(0.1705, abs=5e-5)
    assert job_runs.least_gain(0.5, 0.5, 40) < 0


def test_gsm8k_takes_files_and_keeps_the_settings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []

    def train(run: Run, **_: object) -> Result:
        made.append(run)
        return Result(run.task, run.variant, run.seed, dict(run.settings))

    monkeypatch.setattr(job_runs, "train", train)
    monkeypatch.setenv(experiments.GSM8K_DIRECTORY, str(tmp_path))
    (tmp_path / "train.jsonl").write_text("{}")
    run = Run("GSM8K", "GRPO", 0, experiments.GSM8K, experiments.train_gsm8k)
    with pytest.raises(ConfigurationError, match=r"test\.jsonl"):
        experiments.train_gsm8k(run)
    (tmp_path / "test.jsonl").write_text("{}")
    result = experiments.train_gsm8k(run)
    assert made[0].settings["DATASET"] == str(tmp_path / "train.jsonl")
    assert result.settings == run.settings


def test_trl_gets_the_prompts_of_the_run_in_their_order(tmp_path: Path) -> None:
    with with_model(TINY | {"MAX_STEPS": "2"}) as variables:
        settings = TrainerSettings.load(**{name.lower(): value for name, value in variables.items()})
        prompts = []
        for seed in ("0", "1"):
            seeded = variables | {"DATA_SEED": seed}
            data = DataSettings.load(**{name.lower(): value for name, value in seeded.items()})
            trl_runs.write_questions(data, settings, tmp_path / "questions.jsonl")
            lines = (tmp_path / "questions.jsonl").read_bytes().splitlines()
            prompts.append([orjson.loads(line)["prompt"] for line in lines])
    assert [len(one) for one in prompts] == [2 * settings.batch_size] * 2
    assert len(set(prompts[0])) == len(prompts[0])
    assert prompts[0] != prompts[1]
    assert trl_runs.options(settings)["adam_beta2"] == settings.adam_beta2


def test_the_stages_of_a_run_are_compared_seed_by_seed() -> None:
    def run(variant: str, seed: int, shift: float) -> Result:
        rewards = [0.1 * seed + shift] * 10 + [0.5 + shift] * 10
        return Result("tiny", variant, seed, {}, rewards)

    results = [run(beside_trl.OURS, seed, 0.25) for seed in range(3)]
    results += [run(beside_trl.TRL, seed, 0.0) for seed in range(3)]
    _, _, first, second = beside_trl.stages(results, "tiny").splitlines()
    assert first == "| 1 to 10 | 0.350 | 0.100 | +0.250 (+0.250 to +0.250) | higher |"
    assert second == "| 11 to 20 | 0.750 | 0.500 | +0.250 (+0.250 to +0.250) | higher |"


def test_a_source_alone_has_its_groups_of_the_mix() -> None:
    sizes = {variant: settings.get("BATCH_SIZE") for variant, (settings, _) in mix.variants().items()}
    assert sizes == {"mix": None, "sums alone": "2", "largest alone": "2", "guessing alone": "4"}
    assert mix.MIX_SETTINGS["BATCH_SIZE"] == "8"


def test_the_cost_of_a_mix_is_by_source_and_seed() -> None:
    rewards = {"sums": 0.5, "largest": 0.25, "guessing": 0.75}

    def run(variant: str, sources: list[str], seed: int, shift: float) -> Result:
        figures = {f"reward/{source}": rewards[source] + 0.1 * seed + shift for source in sources}
        return Result(mix.TASK, variant, seed, {}, [0.0], [8 * len(sources)], processor="any", figures=figures)

    results = [run("mix", list(rewards), seed, -0.125) for seed in range(3)]
    results += [run(mix.alone(source), [source], seed, 0.0) for seed in range(3) for source in rewards]
    assert "| sums | 0.600 (0.500 to 0.700) | 0.475 (0.375 to 0.575) | -0.125 (-0.125 to -0.125) | lower |" in (
        mix.costs(results)
    )
    assert mix.cost(results, "mean") == "**lower** (-0.125)"
    assert mix.tokens(results) == "24 by the mix and 24 by its sources alone"
    assert mix.cost([one for one in results if one.seed < 2], "sums") == ""
