from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

from services.chat.tokenizers import load_tokenizer
from tests.toy_models import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep memory-mapped copies of a test's rows in its own directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _save_tokenizer(directory: Path, chat_template: str | None) -> str:
    specials = ["<s>", "</s>", "<system>", "<user>", "<assistant>"]
    byte_tokenizer(specials, chat_template, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return str(directory)


def save_ending_tokenizer(directory: Path, model: str) -> str:
    """Save the tokenizer of ``model`` so that it begins and ends each text, as T5's or some Llamas' do."""
    tokenizer = load_tokenizer(model)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer.save_pretrained(directory)
    shutil.copy(Path(model) / "config.json", directory)
    return str(directory)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer of one token a byte, and a chat template."""
    return _save_tokenizer(tmp_path_factory.mktemp("chat-model"), TEMPLATE)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the same tokenizer, but no chat template."""
    return _save_tokenizer(tmp_path_factory.mktemp("base-model"), None)
