"""The benchmark for GPUs: the same command on processors, with a tiny model."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.job import write_job_group
from local_runner import spec


def test_half_of_the_gpus_are_engines_and_one_gpu_is_shared_without_nccl() -> None:
    made = gpu.runs("a-model", [1, 2, 8], gpu.GSM8K, (100, 10))
    assert [(run.gpus, run.gpus_of_each, run.transport, run.steps) for run in made] == [
        (1, 1, "disk", 100),
        (2, 1, "broadcast", 100),
        (2, 1, "disk", 10),
        (8, 4, "broadcast", 100),
        (8, 4, "disk", 10),
    ]
    assert ["SGLANG_EXTRA_FLAGS" in run.environment for run in made] == [True, False, False, False, False]
    assert gpu.Run("m", 0, "disk", 1, 1.0, {}).gpus_of_each == 0


def test_a_job_group_gets_the_gpus_that_a_run_has(tmp_path: Path) -> None:
    path = write_job_group(tmp_path, "jobgroup.yaml", {}, gpus={"rollout-server": 4, "ppo-trainer": 0})
    assert {task.name: task.gpus_per_node for task in spec.load(path).tasks} == {
        "data-server": 0,
        "rollout-server": 4,
        "reward-server": 0,
        "replay-buffer": 0,
        "ppo-trainer": 0,
    }


def test_figures_are_medians_after_the_first_step_and_the_curve_has_every_step() -> None:
    def step(number: int, seconds: float) -> dict[str, float]:
        phases = {f"seconds_{phase}": seconds for phase in gpu.PHASES}
        counts = {"completions": 4.0, "length_mean": 10.0, "pause_seconds": seconds / 10}
        return {"step": number, "reward_mean": 0.5, **phases, **counts}

    steps = [{"step": 0, "accuracy": 0.1}, step(1, 99.0), step(2, 1.0), step(3, 3.0) | {"accuracy": 0.2}]
    found = gpu.figures(steps)
    assert (found["steps"], found["seconds"]["publish"], found["pause_seconds"]) == (3, 2.0, 0.2)
    assert found["generated_tokens_per_second"] == 20
    assert [point.get("accuracy") for point in found["curve"]] == [0.1, None, None, 0.2]


def test_what_fails_is_noted_and_an_interrupt_is_not() -> None:
    case: dict[str, str] = {}
    with gpu.noting_failure(case):
        raise SystemExit("its log\nerror: out of memory")
    assert case == {"error": "error: out of memory"}
    with pytest.raises(SystemExit), gpu.noting_failure(case):
        raise SystemExit(143)
    [table, _] = gpu.run_tables([{"gpus": 2, "transport": "disk", **case}])
    assert table.row_count == 1


@pytest.mark.leaving
def test_everything_is_measured_on_processors(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, figures = tmp_path / "gpu-benchmark", tmp_path / "gpu.json"
    gpu.GPU.run("gpu", ["--quick", "--models", str(tiny_model), "--results", str(results), "--json", str(figures)])
    found = json.loads(figures.read_text())["sides"]
    assert [case["tokens_per_second"] > 0 for case in found["updates"]] == [True]
    runs = {case["transport"]: case for case in found["runs"]}
    assert {name: run.get("error") for name, run in runs.items()} == {"broadcast": None, "disk": None}
    assert (runs["broadcast"]["steps"], runs["disk"]["steps"]) == gpu.QUICK_STEPS
    assert all(run["seconds"]["publish"] > 0 for run in runs.values())
    assert all("accuracy" in point for point in runs["broadcast"]["curve"])
    assert "greedy pass@1" in capsys.readouterr().out
    with tarfile.open(tmp_path / "gpu-benchmark.tar.gz") as packed:
        names = set(packed.getnames())
    assert {"./results.json", "./nvidia-smi.txt", "./0-gpus-broadcast/metrics.jsonl"} <= names
