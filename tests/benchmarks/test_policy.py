"""Tests of the policy benchmark with a small policy: both sides, their results, and wrong options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import policy
from benchmarks.policy import Side, bound
from services.evaluation_head.checkpoint import save_policy
from tests.services.conftest import free_port
from tests.services.evaluation_head import policies


@pytest.fixture
def wobbles(tmp_path: Path) -> Path:
    save_policy(policies.Wobbles(), tmp_path / "wobbles.pt2", policies.CARTPOLE, policies.LEFT_RIGHT)
    return tmp_path / "wobbles.pt2"


@pytest.mark.slow
def test_both_sides_play_all_battles_with_equal_returns_for_equal_seeds(
    wobbles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--policy", str(wobbles), "--total-battles", "5", "--num-workers", "2", "--save-dir", str(out)]
    assert policy.main([*arguments, "--seed", "100"]) == 0
    found = json.loads((out / "results.json").read_text())
    head, own = found["batched_head"], found["one_model_per_worker"]
    assert (head["battles"], own["battles"], head["head"]["battles_counted"]) == (5, 5, 5)
    assert (head["models"], own["models"]) == (1, 2)
    assert sorted(found["returns"]) == [str(seed) for seed in range(100, 105)]
    assert len(set(found["returns"].values())) > 1, "equal returns would say nothing"
    assert (found["equal_returns"], found["equal_actions"], found["differing_seeds"]) == (True, 5, [])
    assert head["steps"] == own["steps"] == sum(found["returns"].values())
    assert sum(int(size) * count for size, count in head["head"]["batch_sizes"].items()) == head["steps"]
    assert max(map(int, head["head"]["batch_sizes"])) == 2
    assert found["speed_up"] == pytest.approx(head["steps_per_second"] / own["steps_per_second"])
    printed = capsys.readouterr().out
    assert "equal returns for 5 of 5 seeds" in printed
    assert found["bound"] in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-workers", "9", "--total-battles", "8"], "--num-workers is 9; allowed is 1 to --total-battles, 8"),
        (["--num-workers", "0"], "--num-workers is 0"),
        (["--policy", "no-such-policy"], "no policy at no-such-policy"),
        (["--save-dir", "/dev/null/x"], "cannot be written to"),
        (["--device", "cuda:99"], "--device"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    wobbles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    given = ["--policy", str(wobbles), "--save-dir", str(tmp_path / "out"), *arguments]
    assert policy.main(given) == 78
    assert says in capfd.readouterr().err
    assert not (tmp_path / "out/results.json").exists()


@pytest.mark.parametrize(
    ("environment", "says"),
    [("NoSuchGame-v0", "NoSuchGame"), ("CartPole-v1", "ConnectionRefusedError")],
)
def test_a_worker_that_fails_ends_the_benchmark_and_says_why(
    wobbles: Path, capfd: pytest.CaptureFixture[str], environment: str, says: str
) -> None:
    options = argparse.Namespace(
        environment=environment, seed=0, total_battles=1, num_workers=1, device="cpu", deadline=60
    )
    with pytest.raises(SystemExit, match="worker-0 ended with 1"):
        policy.play(options, wobbles, head=free_port())
    assert says in capfd.readouterr().err


@pytest.mark.parametrize(
    ("compute", "cpu", "worker_cpu", "batch_size", "says"),
    [
        (9.0, 9.0, 1.0, 4, "the policy"),
        (3.0, 9.0, 30.5, 4, "processor time"),
        (0.5, 9.5, 5.0, 4, "event loop"),
        (0.5, 2.0, 5.0, 32, "the timeout"),
        (0.5, 2.0, 5.0, 4, "round trips"),
    ],
)
def test_the_bound_is_the_part_that_takes_the_time(
    compute: float, cpu: float, worker_cpu: float, batch_size: int, says: str
) -> None:
    head: dict[str, Any] = {"compute_seconds": compute, "cpu_seconds": cpu, "mean_batch": 3.0}
    options = argparse.Namespace(num_workers=4, batch_size=batch_size, timeout_ms=5.0)
    side = Side(1, 1.0, 10.0, 8, 4000, 0.8, 400.0, {"p50": 5.0}, worker_cpu, 100.0, head)
    assert says in bound(side, options, cores=4)
