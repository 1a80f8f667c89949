from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep memory-mapped copies of a test's rows in its own directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _save_tokenizer(directory: Path, chat_template: str | None) -> str:
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<system>", "<user>", "<assistant>"]
    vocabulary = {token: i for i, token in enumerate(specials + sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=specials[2:]
    )
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer of one token a byte, and a chat template."""
    return _save_tokenizer(tmp_path_factory.mktemp("chat-model"), TEMPLATE)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    return _save_tokenizer(tmp_path_factory.mktemp("base-model"), None)
