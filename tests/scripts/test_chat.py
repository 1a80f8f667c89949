"""Two models answer each line side by side: the one that a run has made, and the one that it began as."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import chat
from scripts.chat import ChatModel
from services.core.errors import ConfigurationError


@pytest.fixture
def run_dir(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose model answers nothing: each of its tokens is as likely, and the first one ends the answer."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "grpo-1"
    (run / "model").mkdir(parents=True)
    for path in tiny_model.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (run / "model" / path.name).write_bytes(path.read_bytes())
    weights = load_file(tiny_model / "model.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in weights.items()}, run / "model/model.safetensors")
    (run / "metrics.jsonl").touch()
    components = {"ppo-trainer": {"settings": {"model_name": str(tiny_model)}}}
    (run / "config.json").write_text(json.dumps({"components": components}))
    return run


def test_the_answers_of_both_models_stand_side_by_side(run_dir, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("3+4=\n\n2+2="))
    monkeypatch.setenv("COLUMNS", "400")
    chat.main(max_new_tokens=4)
    said = capsys.readouterr().out
    tables = said.split("┏")[1:]
    assert len(tables) == 2
    assert all(str(tiny_model) in table and "runs/grpo-1/model" in table for table in tables)
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in said.splitlines() if line.startswith("│")]
    expected = ChatModel(str(tiny_model), {}).answer("3+4=", 4, 0)
    assert rows[0][0] == expected != rows[0][1]


def test_an_answer_is_as_long_as_the_run_trained_them_unless_a_length_is_given(run_dir, monkeypatch, capsys):
    config = json.loads((run_dir / "config.json").read_text())
    config["components"]["ppo-trainer"]["settings"]["max_new_tokens"] = 2
    (run_dir / "config.json").write_text(json.dumps(config))
    asked = []
    monkeypatch.setattr(ChatModel, "answer", lambda self, line, tokens, temperature: asked.append(tokens) or line)
    for given in (None, 3):
        monkeypatch.setattr(sys, "stdin", io.StringIO("3+4="))
        chat.main(max_new_tokens=given)
    assert asked == [2, 2, 3, 3]
    assert "an answer ends after 2 tokens" in capsys.readouterr().out


def test_a_run_that_does_not_say_its_length_asks_for_one(run_dir):
    with pytest.raises(ConfigurationError, match="give --max-new-tokens"):
        chat.main()


def test_a_conversation_has_the_system_prompt_and_the_earlier_turns(tiny_model):
    model = ChatModel(str(tiny_model), {"system_prompt": "1+1=2", "prompt_style": "chat"})
    answer = model.answer("3+4=", 4, 0)
    assert [turn["content"] for turn in model.messages] == ["1+1=2", "3+4=", answer]
    plain = ChatModel(str(tiny_model), {"prompt_style": "plain"})
    plain.answer("3+4=", 4, 0)
    assert plain.messages == []


def test_a_line_that_the_engine_refuses_is_answered_by_the_reason(tiny_model):
    assert ChatModel(str(tiny_model), {}).answer("1" * 9000, 4, 0).startswith("error: the prompt has 9000 tokens")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("model/config.json", "runs/grpo-1 has no model/, which a run writes at its end; runs with a model: "),
        ("config.json", "runs/grpo-1/config.json does not name the model that the run began as"),
    ],
)
def test_a_run_that_cannot_be_talked_to_is_refused_in_one_line(run_dir, missing, said):
    (run_dir / missing).unlink()
    with pytest.raises(ConfigurationError) as refusal:
        chat.main()
    [line] = str(refusal.value).splitlines()
    assert said in line
