"""``grpo rehearse`` finds each of many planted mistakes, and lets a launch without one pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoConfig
from typer.testing import CliRunner

from scripts.rehearse import main, make_stand_in
from services.chat.tokenizers import load_tokenizer, tokenizer_digest
from services.core.errors import ConfigurationError
from tests.local_runner.in_process import asks_here
from tests.services.core.hub_stand_in import MODEL, serving
from tests.toy_models import byte_tokenizer
from trainer.capacity.shape import CONFIGS

__all__ = ["asks_here"]

ROOT = Path(__file__).parents[2]
APP = typer.Typer()
APP.command()(main)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGINNING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TOOLS + TURNS + BEGINNING
ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test whose rehearsal reads rows, or starts a job group. The limit is for a hang."""
    return pytest.mark.slow(pytest.mark.timeout(1800)(test))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyPilot uploads the files of the project, below which SOURCES must be."""
    monkeypatch.chdir(ROOT)


def target(directory: Path, template: str | None = CHATML, end: str | None = "<|im_end|>") -> Path:
    """Write the configuration of a model of 8B, and a tokenizer of its own; there are no weights."""
    names = {} if end is None else {"eos_token": end}
    tokenizer = byte_tokenizer(SPECIALS, template, pad_token="<|endoftext|>", **names)
    config = deepcopy(CONFIGS["8B"][1])
    config.vocab_size, config.max_position_embeddings, config.eos_token_id = 512, 4096, tokenizer.eos_token_id
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def dataset(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rehearse(model: Path, *options: str, **settings: str) -> tuple[int, str]:
    """Return the exit code of a rehearsal and what it printed."""
    env = [part for name, value in settings.items() for part in ("--env", f"{name}={value}")]
    done = CliRunner().invoke(APP, ["--model", str(model), *options, *env])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def finds(found: tuple[int, str], *sentences: str) -> None:
    """Check that a rehearsal has found these mistakes and no other ones, each in a numbered sentence."""
    code, text = found
    told = text.partition("what to change:\n")[2].splitlines()
    changes = [line for line in told if line[:1].isdigit()]  # notes go to stderr, at any place
    assert code == 1, text
    for sentence in sentences:
        assert any(sentence in line for line in changes), f"{sentence}\n{text}"
    assert len(changes) == len(sentences), text


def test_a_stand_in_is_small_and_speaks_as_the_model_does(tmp_path: Path) -> None:
    model, small = target(tmp_path / "model"), tmp_path / "small"
    make_stand_in(str(model), small)
    assert (small / "model.safetensors").stat().st_size < 1e6
    before, after = (load_tokenizer(str(path)) for path in (model, small))
    assert tokenizer_digest(before) == tokenizer_digest(after)
    config, of_model = (json.loads((path / "config.json").read_text()) for path in (small, model))
    for name in ("model_type", "vocab_size", "max_position_embeddings", "eos_token_id"):
        assert config[name] == of_model[name], name


def test_a_stand_in_of_a_hybrid_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    model, small = target(tmp_path / "model"), tmp_path / "small"
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    AutoConfig.for_model("qwen3_5_text", vocab_size=300, num_hidden_layers=4, layer_types=kinds).save_pretrained(model)
    make_stand_in(str(model), small)
    assert json.loads((small / "config.json").read_text())["layer_types"] == ["linear_attention", "full_attention"]


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    model = target(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"model_type": "vit"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="MODEL_NAME"):
        make_stand_in(str(model), tmp_path / "small")


@pytest.mark.slow
def test_of_a_model_on_the_hub_everything_but_the_weights_is_downloaded(tmp_path: Path) -> None:
    served = target(tmp_path / "served")
    (served / "model.safetensors").write_bytes(b"16 GB")
    command = ["rehearse", "--model", MODEL, "--steps", "0"]
    command += ["--env", "BATCH_SIZE=4", "--env", "UPDATES_PER_BATCH=8"]
    with serving(served, tmp_path / "cache") as (hub, variables):
        environment = os.environ | variables
        done = subprocess.run(
            [sys.executable, "-m", "scripts.grpo", *command], env=environment, capture_output=True, text=True
        )
    finds((done.returncode, done.stdout), "UPDATES_PER_BATCH is 8; allowed is at most BATCH_SIZE (4)")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= hub.fetched.keys()
    assert "model.safetensors" not in hub.fetched


def test_settings_that_do_not_fit_together_are_found_before_anything_is_read(tmp_path: Path) -> None:
    found = rehearse(target(tmp_path), "--steps", "0", BATCH_SIZE="4", UPDATES_PER_BATCH="8")
    finds(found, "UPDATES_PER_BATCH is 8; allowed is at most BATCH_SIZE (4)")


@slow
def test_mistakes_in_rewards_are_found(tmp_path: Path) -> None:
    file = "tests/scripts/rehearsed_rewards.yaml"
    found = rehearse(target(tmp_path), "--steps", "0", SOURCES=file, MAX_STEPS="9")
    finds(
        found,
        "rewards of constant: a right, an empty and a senseless answer have the same reward",
        "ValueError: substring not found",
        "answers have no reward, the first with error for the answer '' to nan/train/",
    )


TEXTS = [{"text": row["question"], "answer": row["answer"]} for row in ROWS]
UNANSWERED = [row | {"answer": ""} for row in ROWS]
LACKS_COLUMNS, NO_END = "has none of the columns question, prompt, problem", "ends an answer with '<|im_end|>'"
NO_TEMPLATE = ("has no chat template, which agents", "has no chat template; set PROMPT_STYLE=plain")


@pytest.mark.parametrize(
    ("model", "rows", "settings", "sentences"),
    [
        ({"template": TOOLS + TURNS}, ROWS, {"GROUND_TRUTH_COLUMN": "anwser"}, ("anwser", "has no generation prompt")),
        ({"end": "<|endoftext|>"}, TEXTS, {}, (LACKS_COLUMNS, NO_END)),
        ({"end": None}, UNANSWERED, {}, ("with no ground truth", "has no end token")),
        ({"template": None}, ROWS, {"AGENT": "tests.nowhere:solve"}, ("tests.nowhere", *NO_TEMPLATE)),
    ],
)
def test_mistakes_in_model_rows_and_settings_are_found(
    tmp_path: Path,
    model: dict[str, str | None],
    rows: Any,
    settings: dict[str, str],
    sentences: tuple[str, ...],
    asks_here: None,
) -> None:
    given = {"DATASET": dataset(tmp_path / "rows.jsonl", rows), **settings}
    finds(rehearse(target(tmp_path / "model", **model), "--steps", "0", **given), *sentences)


@pytest.mark.e2e
@slow
def test_mistakes_of_agents_and_environments_are_found_by_a_run(tmp_path: Path) -> None:
    model = target(tmp_path, TURNS + BEGINNING)
    code, text = rehearse(model, SOURCES="tests/scripts/rehearsed_episodes.yaml", MAX_STEPS="9")
    assert code == 1
    for sentence in (
        "the agent never called the model",
        "ignores the tools that the agent offers, so that",
        "levels.txt is missing",
    ):
        assert sentence in text.partition("what to change:")[2], text


@pytest.mark.e2e
@slow
def test_a_launch_without_a_mistake_is_ready(tmp_path: Path) -> None:
    code, text = rehearse(target(tmp_path), DATASET="arithmetic", REWARD_FN="exact_match", MAX_NEW_TOKENS="32")
    assert code == 0, text
    assert "step 2" in text
