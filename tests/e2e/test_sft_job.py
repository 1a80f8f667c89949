"""Supervised fine-tuning whole, without engines and beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.system import System, one_each

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
"""Two passes over the rows."""


def has_learned(lines: list[dict[str, float]]) -> bool:
    """Returns whether the loss of the second pass is below that of the first, over the same rows."""
    return sum(line["loss"] for line in lines[3:]) < sum(line["loss"] for line in lines[:3])


def run(volume: Path, tiny_model: Path, run_id: str, job_group: str = "jobgroups/sft.yaml", **settings: str) -> System:
    rows = volume / "rows.jsonl"
    if not rows.exists():
        sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(6)]
        rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return System(
        volume,
        tiny_model,
        *one_each("ppo-trainer"),
        run_id=run_id,
        job_group=job_group,
        DATASET=str(rows),
        REPLAY_GROUPS="",
        CHECKPOINT_EVERY="1",
        MAX_STEPS=str(STEPS),
        **settings,
    )


def test_a_run_without_engines_learns(tiny_model: Path, tmp_path: Path) -> None:
    alone = run(tmp_path, tiny_model, "alone")
    assert alone.wait() == 0, alone.text
    assert [line["step"] for line in alone.metrics()] == list(range(1, STEPS + 1))
    assert has_learned(alone.metrics())
    components = json.loads((alone.run_dir / "config.json").read_text())["components"]
    assert components.keys() == {"ppo-trainer", "data-server"}


def test_a_run_beside_engines_is_evaluated_as_it_goes(tiny_model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6, 10) for b in range(4)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in sums))
    evaluated = {"METHOD": "sft", "DATASET_TEST": str(questions), "EVAL_EVERY": "3", "EVAL_PROMPTS": "8"}
    evaluated |= {"PUBLISH_TYPE": "float32", "ENGINE_DTYPE": "float32"}
    system = run(tmp_path, tiny_model, "evaluated", "jobgroup.yaml", **evaluated)
    assert system.wait() == 0, system.text
    lines = system.metrics()
    assert [line["step"] for line in lines if line.get("eval_prompts") == 8] == [3, 6]
    assert all(0 <= line["accuracy"] <= 1 for line in lines if "accuracy" in line)
    assert has_learned(lines)
    assert system.summary()["accuracy_before"] is not None, "it was evaluated before the first step, too"
