"""grpo evaluate-policy: results by seed, a death of the command, refusals."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from evaluation.trajectories import RESULTS, Options, generate
from services.core.errors import ConfigurationError
from tests.evaluation import trajectory_policies
from tests.services.evaluation_head import policies
from tests.waiting import LIMIT_SECONDS, bytes_in, wait_until

ROOT = Path(__file__).parents[2]
MINE = "tests.evaluation.trajectory_policies"


def run(save_to: Path, **options: Any) -> dict[str, Any]:
    given = {"environment": "CartPole-v1", "episodes": 4, "at_once": 1, "seed": 7, "policies": f"left={MINE}:left"}
    given |= {"shard_episodes": 2, "is_single": True, **options}
    return asyncio.run(generate(Options(save_to=save_to, **given), lambda _: None))


def returns_of(results: dict[str, Any]) -> dict[int, float]:
    return {one["seed"]: one["episode_return"] for one in results["episodes"]}


def return_of(seed: int, policy: str = "left", environment_id: str = "CartPole-v1") -> float:
    environment = gymnasium.make(environment_id)
    state, _ = environment.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        [action] = getattr(trajectory_policies, policy)([state.tolist()])
        state, reward, terminated, truncated, _ = environment.step(action)
        total, is_over = total + float(reward), terminated or truncated
    return total


def test_results_are_those_of_the_environment(tmp_path: Path) -> None:
    results = run(tmp_path, episodes=5)
    returns = [return_of(seed) for seed in range(7, 12)]
    assert returns_of(results) == dict(enumerate(returns, start=7))
    assert results["mean_return"]["value"] == pytest.approx(np.mean(returns))
    assert results["mean_return"]["low"] <= np.mean(returns) <= results["mean_return"]["high"]
    assert (results["steps"], results["policy"], results["policy_versions"]) == (sum(returns), "left", [None])
    assert [episode["steps"] for episode in results["episodes"]] == returns
    assert json.loads((tmp_path / RESULTS).read_text()) == results


def test_a_torch_policy_is_loaded_and_its_version_is_recorded(tmp_path: Path) -> None:
    policies.publish_wobbles(tmp_path / "wobbles", 3)
    results = run(tmp_path / "out", policies=f"wobbles={tmp_path / 'wobbles'}")
    assert (results["policy_versions"], len(results["episodes"])) == ([3], 4)


def test_episodes_played_together_are_those_played_one_by_one(tmp_path: Path) -> None:
    alone, together = (run(tmp_path / str(n), episodes=6, at_once=n)["episodes"] for n in (1, 3))
    assert len({episode["steps"] for episode in alone}) > 1, "they end at different steps"
    assert alone == together


def command(save_to: Path) -> list[str]:
    given = ["--save-to", str(save_to), "--episodes", "8", "--policies", f"lean={MINE}:slow_lean"]
    return [sys.executable, "-m", "scripts.grpo", "evaluate-policy", *given, "--shard-episodes", "2"]


def start(save_to: Path) -> subprocess.Popen[str]:
    """Start the command; return it once it has written a file more than there were."""
    before = len(list(save_to.glob("*.parquet")))
    process = subprocess.Popen(command(save_to), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(
        lambda: len(list(save_to.glob("*.parquet"))) > before or process.poll() is not None,
        "another file",
        progress=lambda: bytes_in(save_to),
    )
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.slow
def test_a_signal_ends_the_command_and_the_same_command_continues(tmp_path: Path) -> None:
    process = start(tmp_path / "out")
    try:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; the same command continues from" in said
    assert not (tmp_path / "out" / RESULTS).exists()
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.parquet")}
    process = start(tmp_path / "out")
    process.kill()
    process.communicate()
    done = subprocess.run(command(tmp_path / "out"), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert first.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.parquet")}.items()
    results = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert returns_of(results) == {seed: return_of(seed, "lean") for seed in range(8)}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    policies.publish_times(tmp_path / "times", 1)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"policies": f"left={MINE}:left,lean={MINE}:lean"}, "--policies left, lean"),
        ({"policies": f"times={tmp_path / 'times'}"}, r"policy 'times' takes .* shape \[2\]"),
        ({"environment": "nim"}, "nim has 2 seats"),
        ({"policies": "far=head+http://127.0.0.1:8080"}, "HEAD_POLICIES"),
    ]
    for options, says in refusals:
        with pytest.raises(ConfigurationError, match=says):
            run(tmp_path / "out", **options)
