"""A run from Python, whole, with rows and a reward of the caller's, which a fork and an explanation find again."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from local_runner.train import train

# The limit is for a hang; the two runs take about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(2)]
REWARD = """
def digits(response: str) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)
"""


def test_a_run_from_python_is_forked_and_explained(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward.py").write_text(REWARD)
    digits = importlib.import_module("my_reward").digits
    options = {"rollout_engine": "embedded", "prompt_style": "plain", "max_new_tokens": 6, "min_workers": 1}
    options |= {"max_steps": 3, "keep_checkpoints_every": 1, "checkpoints_kept": 1, "record_groups": "all"}
    run = train(model_name=str(tiny_model), dataset=ROWS, reward_fn=digits, run_id="base", **options)
    assert (run.summary["status"], [*run.metrics.index]) == ("succeeded", [1, 2, 3])

    def grpo(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.grpo", *words], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    grpo("fork", "base", "--at", "2", "--env", "LEARNING_RATE=1e-3")
    forked = [json.loads(line) for line in (tmp_path / "runs/base-at-2/metrics.jsonl").read_text().splitlines()]
    assert [record["learning_rate"] for record in forked] == [*run.metrics["learning_rate"][:2], 1e-3]
    explained = json.loads(grpo("explain", "base", "--step", "3", "--json"))
    assert (explained["step"], explained["compared"]["step"], explained["compared"]["reason"]) == (3, None, None)
