"""A fork without a change equals its run to the bit, whole: from a kept checkpoint, or with steps that run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from local_runner.train import RunError, train
from tests.e2e.system import System, grpo

# The limit is for a hang; the three runs take about two minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
MEASURED = ("seconds", "per_second", "time", "memory")
SETTINGS = {
    "MAX_STEPS": str(STEPS),
    "KEEP_CHECKPOINTS_EVERY": "2",
    "CHECKPOINTS_KEPT": "1",
    "LR_SCHEDULE": "linear",
    "EVAL_PROMPTS": "4",
}


@pytest.fixture(scope="module")
def base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    system = System(tmp_path_factory.mktemp("volume"), tiny_model, "--small", run_id="base", **SETTINGS)
    assert system.wait() == 0, system.text
    return system


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without times and memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not any(word in name for word in MEASURED)} for line in lines]


def samples(run_dir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "prompt", "completion", "reward")
    return [tuple(json.loads(line)[name] for name in names) for line in (run_dir / "samples.jsonl").open()]


def test_a_fork_without_a_change_equals_its_run_to_the_bit(base: System) -> None:
    assert "base-at-2 takes " in grpo("fork", base.run_dir, "--at", "2")
    forked = base.run_dir.with_name("base-at-2")
    assert [line["step"] for line in metrics(forked)] == list(range(1, STEPS + 1))
    assert metrics(forked) == metrics(base.run_dir)
    assert samples(forked) == samples(base.run_dir)
    weights = "model/model.safetensors"
    assert (forked / weights).read_bytes() == (base.run_dir / weights).read_bytes()


def test_a_fork_at_a_step_without_a_checkpoint_runs_its_steps_again_and_then_differs_by_its_change(
    base: System,
) -> None:
    said = grpo("fork", base.run_dir, "--at", "1", "--env", "LEARNING_RATE=1e-3", "--run-id", "faster")
    assert "steps 1 to 1 are run again from the beginning" in said
    forked = base.run_dir.with_name("faster")
    before, after = metrics(base.run_dir), metrics(forked)
    assert after[0] == before[0]
    assert after[1]["learning_rate"] == pytest.approx(10 * before[1]["learning_rate"])
    assert (after[1]["loss"], after[2]["loss"] != before[2]["loss"]) == (before[1]["loss"], True)
    record = json.loads((forked / "fork.json").read_text())
    assert record == {"parent": "base", "at": 1, "changes": ["LEARNING_RATE=1e-3"]}


def test_a_secret_is_not_in_the_record_of_a_fork(base: System) -> None:
    grpo("fork", base.run_dir, "--at", "2", "--run-id", "secret", "--prepare", "--env", "WANDB_API_KEY=abc")
    record = json.loads((base.run_dir.with_name("secret") / "fork.json").read_text())
    assert record["changes"] == ["WANDB_API_KEY"]


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
