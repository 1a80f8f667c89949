"""A run's model and its card become one commit of the hub, and a published adapter a model directory in float32."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file
from transformers import AutoTokenizer

from scripts.models import merge_adapter, push
from services.core.errors import ConfigurationError
from tests.adapters import adapted_logprobs, save_adapter
from trainer.reporting.model_card import write_card

WEIGHTS = {"model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
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
    "rows": 1234,
    "rows_left_out": {"no answer": 3},
    "device": "cpu",
    "compute_type": "float32",
    "ranks": 2,
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


class Hub:
    """The hub's client, as far as the command uses it."""

    endpoint = "https://hub"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.made: list[Any] = []

    def create_repo(self, repository: str, **options: Any) -> SimpleNamespace:
        self.made.append((repository, options))
        return SimpleNamespace(repo_id=repository)

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        self.made.append((repo_id, {path.name for path in folder_path.iterdir()}, commit_message))
        return SimpleNamespace(commit_url=f"{self.endpoint}/{repo_id}/commit/1")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a finished run."""
    run = tmp_path / "mine"
    (run / "model").mkdir(parents=True)
    for name, content in {**WEIGHTS, "config.json": b"{}"}.items():
        (run / "model" / name).write_bytes(content)
    (run / "reward.png").write_bytes(b"a picture")
    (run / "nodes.json").write_text("{}")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "config.json").write_text(json.dumps({"components": {"ppo-trainer": TRAINER}}))
    lines = [{"step": step, "completions": 16, "completion_tokens": 1000.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_the_model_and_its_card_become_one_commit(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    push("mine", "org/mine", private=True, below=runs)
    files = {*WEIGHTS, "config.json", "README.md", "reward.png"}
    made = ("org/mine", {"private": True, "exist_ok": True})
    assert hub.made == [made, ("org/mine", files, "The model of run mine")]
    assert "https://hub/org/mine/commit/1" in capsys.readouterr().out


def test_the_card_has_results_with_intervals_and_neither_secrets_nor_paths(runs: Path) -> None:
    card = write_card(runs / "mine").read_text()
    assert card.startswith("---\nbase_model: team/base\n")
    assert "| accuracy, greedy, 20 held-out prompts | 0.100 (0.050 to 0.200) | 0.900 (0.800 to 0.950) |" in card
    assert "| tokens generated | 2,000 |" in card
    assert "| rows | 1,234, 3 left out |" in card
    assert "| ppo-trainer | `LOSS` | `cispo` |" in card
    for hidden in ("********", "/home", "RUN_ID"):
        assert hidden not in card


def test_what_cannot_be_pushed_is_refused_with_the_remedy(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="no name of a repository"):
        push("mine", "no name", below=runs)
    for error, named in (
        (LocalTokenNotFoundError(), "hf auth login"),
        (RuntimeError("no room"), "no room. Nothing of it is committed"),
    ):
        monkeypatch.setattr("huggingface_hub.HfApi", lambda error=error: Hub(error))
        with pytest.raises(ConfigurationError, match=named):
            push("mine", "org/mine", below=runs)
    with pytest.raises(ConfigurationError, match="other"):
        push("other", "org/mine", below=runs)
    for file in (runs / "mine" / "model").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match="no trained model"):
        push("mine", "org/mine", below=runs)


def test_the_merged_model_computes_what_model_and_adapter_compute(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tiny_model, tmp_path / "adapter", 1)
    merge_adapter(adapter, tmp_path / "merged")
    ids = [5, 12, 6, 14, 9, 1]
    wanted = adapted_logprobs(tiny_model, adapter, ids)
    assert adapted_logprobs(tmp_path / "merged", None, ids) == pytest.approx(wanted, abs=1e-5)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()
