"""A run's model has a card, and a published adapter becomes a model directory in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from scripts.models import merge_adapter
from tests.adapters import adapted_logprobs, save_adapter
from trainer.reporting.run_files import write_card

SUMMARY = {
    "status": "succeeded",
    "steps": 2,
    "seconds": 61.0,
    "reward_first": 0.25,
    "reward_last": 0.75,
    "reward_steps": 1,
    "accuracy_before": 0.1,
    "accuracy_before_low": 0.05,
    "accuracy_before_high": 0.2,
    "accuracy_after": 0.9,
    "accuracy_after_low": 0.8,
    "accuracy_after_high": 0.95,
    "accuracy_after_prompts": 20,
    "model": "team/base",
    "dataset": "/home/somebody/rows|of.jsonl",
}
TRAINER = {
    "settings": {
        "advantage": "grpo",
        "loss": "cispo",
        "jobgroup_token": "**********",
        "run_id": "mine",
        "learning_rate": 2e-5,
    },
    "changed": ["loss", "jobgroup_token", "run_id", "learning_rate"],
    "packages": {"torch": "2.13.0"},
    "commit": "abc123",
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a finished run."""
    run = tmp_path / "mine"
    (run / "model").mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "config.json").write_text(json.dumps({"components": {"ppo-trainer": TRAINER}}))
    return tmp_path


def test_the_card_has_results_with_intervals_and_neither_secrets_nor_paths(runs: Path) -> None:
    card = write_card(runs / "mine").read_text()
    assert card.startswith("---\nbase_model: team/base\n")
    assert "| accuracy, greedy, 20 held-out prompts | 0.100 (0.050 to 0.200) | 0.900 (0.800 to 0.950) |" in card
    assert "| ppo-trainer | `LOSS` | `cispo` |" in card
    for hidden in ("********", "/home", "RUN_ID"):
        assert hidden not in card


def test_the_merged_model_computes_what_model_and_adapter_compute(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tiny_model, tmp_path / "adapter", 1)
    merge_adapter(adapter, tmp_path / "merged")
    ids = [5, 12, 6, 14, 9, 1]
    wanted = adapted_logprobs(tiny_model, adapter, ids)
    assert adapted_logprobs(tmp_path / "merged", None, ids) == pytest.approx(wanted, abs=1e-5)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()
