"""The codec gives the tokens and texts of transformers, whatever the tokenizer does at a text's beginning."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import TokenizersBackend

from services.chat.tokenizers import TextCodec, load_tokenizer

PIECES = ["<s>", "</s>", "</s>x", "<t>", " ", "\n", "a", "b a", "  ab", "é", "<", "s>"]


def small(*tokens: str | AddedToken, normalizer: Any = None, first: str = "first") -> TokenizersBackend:
    """Return a tokenizer of characters, which marks words as ``first`` says."""
    characters = ["▁", *"abxsté<>/ \n"]
    backend = Tokenizer(BPE(vocab={text: place for place, text in enumerate([*characters, "ab"])}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(["<s>", "</s>", "</s>x"])
    backend.add_tokens(["<t>", *tokens])
    backend.enable_truncation(3)
    return TokenizersBackend(tokenizer_object=backend)


TOKENIZERS: dict[str, Callable[[], TokenizersBackend]] = {
    "marked at the first word": small,
    "marked after each special token": lambda: small(first="always"),
    "with a normalizer": lambda: small(normalizer=normalizers.Prepend("▁"), first="never"),
    "with a token that takes space": lambda: small(AddedToken("<s>a", lstrip=True, normalized=False)),
    "with a token that is a word": lambda: small(AddedToken("a", single_word=True, normalized=False)),
}


def check(tokenizer: Any, codec: TextCodec, pieces: list[str], times: int) -> None:
    """Compare texts of random pieces; most pieces come again."""
    draw = random.Random(0)
    for _ in range(times):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert codec.encode(text) == ids, text
        for skip in (False, True):
            asked = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert codec.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, **asked)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_transformers(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    codec = TextCodec(tokenizer)
    check(tokenizer, codec, PIECES, 300)


def test_a_models_tokens_are_those_of_transformers(models: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(str(models("smollm2")))
    check(tokenizer, TextCodec(tokenizer), ["<|im_start|>", "user\n", "<|im_end|>", "\n", " What", "?", "  "], 100)


def test_a_tokenizer_with_an_encoding_of_its_own_keeps_it() -> None:
    class Own(TokenizersBackend):  # type: ignore[misc]  # transformers has no types here
        def _encode_plus(self, text: Any, **options: Any) -> Any:
            return {"input_ids": [len(text)]}

    codec = TextCodec(Own(tokenizer_object=small().backend_tokenizer))
    assert codec.encode("<s>abc") == [6]
    assert codec.decode([1, 2]) == "a b"
