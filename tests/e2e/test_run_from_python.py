"""A run from Python, whole, and what its object can do: it is forked, explained, evaluated and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from local_runner.train import RunError, train

# The limit is for a hang; the two runs and the evaluation take about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(2)]


def test_a_run_from_python_is_forked_explained_evaluated_and_compared(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows and a reward of the caller's, which the fork and the explanation find again."""
    monkeypatch.chdir(tmp_path)

    def digits(response: str) -> float:
        return sum(letter.isdigit() for letter in response) / max(len(response), 1)

    options = {"rollout_engine": "embedded", "prompt_style": "plain", "max_new_tokens": 6, "min_workers": 1}
    options |= {"max_steps": 3, "keep_checkpoints_every": 1, "checkpoints_kept": 1, "record_groups": "all"}
    run = train(model_name=str(tiny_model), dataset=ROWS, reward_fn=digits, run_id="base", **options)
    forked = run.fork(2, learning_rate=1e-3)
    assert forked.directory == run.directory.with_name("base-at-2")
    difference = run.compare(forked)["learning_rate"]
    assert (difference[1], difference[2]) == (0, 0) != (0, difference[3])
    explained = run.explain(3)
    assert (explained["step"], explained["compared"]["step"], explained["compared"]["reason"]) == (3, None, None)
    results = run.evaluate(
        dataset="arithmetic", limit=4, samples=1, env=["ROLLOUT_ENGINE=embedded", "PROMPT_STYLE=plain"]
    )
    assert "avg@1" in results["metrics"] or "avg_at_1" in results["metrics"], results
    with pytest.raises(RunError, match="has 3 steps"):
        run.fork(9)
    with pytest.raises(TypeError, match="give text or a number, of a function its module:function"):
        run.fork(2, reward_fn=digits)
