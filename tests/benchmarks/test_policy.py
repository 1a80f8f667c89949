"""Tests of the policy benchmark with a small policy: both sides, their results, and what ends it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import policy
from evaluation.policy.worker import Work
from evaluation.policy.workers import MODULE
from services.evaluation_head.checkpoint import save_policy
from tests.services.evaluation_head import policies

pytestmark = pytest.mark.leaving


@pytest.fixture
def wobbles(tmp_path: Path) -> Path:
    save_policy(policies.Wobbles(), tmp_path / "wobbles.pt2", policies.CARTPOLE, policies.LEFT_RIGHT)
    return tmp_path / "wobbles.pt2"


def test_both_sides_play_all_battles_with_equal_returns_for_equal_seeds(
    wobbles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--policy", str(wobbles), "--total-battles", "5", "--num-workers", "2", "--save-dir", str(out)]
    assert policy.POLICY.run("policy", arguments) == 0
    [found] = json.loads((out / "results.json").read_text())
    head, own = found["batched_head"], found["one_model_per_worker"]
    assert (head["battles"], own["battles"], head["battles_counted"]) == (5, 5, 5)
    assert (head["models"], own["models"]) == (1, 2)
    assert sorted(head["returns"]) == sorted(own["returns"]) == [str(seed) for seed in range(5)]
    assert len(set(head["returns"].values())) > 1, "equal returns would say nothing"
    assert found["differing_returns"] == found["differing_actions"] == []
    assert head["steps"] == own["steps"] == sum(head["returns"].values())
    assert sum(int(size) * count for size, count in head["batch_sizes"].items()) == head["steps"]
    assert max(map(int, head["batch_sizes"])) == 2
    assert found["speed_up"] == pytest.approx(head["steps_per_second"] / own["steps_per_second"])
    assert "equal returns for 5 of 5 seeds" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["9", "0"])
def test_more_workers_than_battles_are_refused_before_anything_starts(tmp_path: Path, workers: str) -> None:
    message = f"--num-workers is {workers}; allowed is 1 to 8"
    with pytest.raises(SystemExit, match=message):
        policy.POLICY.run(
            "policy", ["--total-battles", "8", "--num-workers", workers, "--save-dir", str(tmp_path / "out")]
        )
    assert not (tmp_path / "out").exists()


def test_a_policy_that_the_head_cannot_serve_ends_the_benchmark(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="its output is above"):
        policy.POLICY.run("policy", ["--policy", "no-such-policy", "--save-dir", str(tmp_path)])
    assert "no-such-policy" in capfd.readouterr().err


def test_a_worker_that_fails_ends_the_benchmark_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(total_battles=1, num_workers=1, episodes_at_once=1)
    with pytest.raises(SystemExit, match="worker-0 exited with code 78"):
        policy.play(options, Work("", "NoSuchGame-v0", "http://127.0.0.1:9"), MODULE)
    assert "NoSuchGame" in capfd.readouterr().err
