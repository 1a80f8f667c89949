"""A model's tokenizer: loaded without the model, and a quicker way through it for single texts."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from services.core.errors import ConfigurationError, first_line
from services.core.files import check_model_directory
from services.protocol.base import PROBE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PIECES = 512
"""Texts whose tokens a TextCodec keeps."""


def import_transformers_alone() -> None:
    """Import transformers as if torch were not installed, for a process that needs only tokenizers.

    Otherwise transformers imports torch wherever that is installed, which takes seconds and hundreds of megabytes that
    a tokenizer does not need. Where torch is imported already, nothing is to be gained.
    """
    if "torch" in sys.modules:
        return
    # Read at import. Without it, transformers warns that torch is missing.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A None makes a module look absent. It is removed again because other libraries would take it for the module.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model on the hub, in its cache, or in a directory.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
    """
    check_model_directory(model_name)
    from transformers import AutoTokenizer

    try:
        # Explicit, because the default asks at a terminal whether to run code that comes with the model.
        return AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    # The error's type depends on the hub client, the network and the files: OSError, ValueError, KeyError, ...
    except Exception as error:
        if (directory := Path(model_name).expanduser()).is_dir() and not any(directory.glob("tokenizer*")):
            raise ConfigurationError(
                f"MODEL_NAME={model_name} has no tokenizer: {directory.resolve()} has neither tokenizer.json nor "
                "tokenizer.model; copy those of the model that it was made from"
            ) from error
        raise ConfigurationError(
            f"the tokenizer of MODEL_NAME {model_name!r} cannot be loaded from the Hugging Face hub, its cache or a "
            f"directory of that name: {first_line(error)}; check the name and the network, or give a directory"
        ) from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of vocabulary, special tokens, chat template and the tokens of PROBE."""
    content = (
        sorted((number, str(token)) for token, number in tokenizer.get_vocab().items()),
        (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id),
        tokenizer.chat_template,
        tokenizer(PROBE)["input_ids"],
    )
    return hashlib.blake2b(ascii(content).encode(), digest_size=8).hexdigest()


class TextCodec:
    """A tokenizer's encoding and decoding of single texts, the same tokens and texts as from transformers.

    A text is cut before its special tokens, so that most messages of a chat are pieces of their own, and the tokens of
    the last MAX_PIECES pieces are kept. Conversations share their system prompt, and the episodes of a group share the
    whole question.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import TokenizersBackend

        self._tokenizer = tokenizer
        tokenizer.encode("")  # Turns off the truncation and padding that a tokenizer.json may ask for.
        methods = ("encode", "_encode_plus", "decode", "_decode")
        is_plain = all(getattr(type(tokenizer), name, 0) is getattr(TokenizersBackend, name) for name in methods)
        self._backend = tokenizer.backend_tokenizer if is_plain else None
        self._boundary = _boundary(tokenizer) if is_plain else None
        self._encode_piece = functools.lru_cache(maxsize=MAX_PIECES)(self._encode)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens; special tokens are found in the text, and none is added."""
        if self._boundary is None:
            return self._encode(text)
        cuts = [0, *(match.start() for match in self._boundary.finditer(text) if match.start()), len(text)]
        return [token for start, end in pairwise(cuts) for token in self._encode_piece(text[start:end])]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        if self._backend is not None:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            text = self._tokenizer.decode(list(ids), **options)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int]
        if self._backend is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids


def _boundary(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return the pattern of the special tokens; None where a cut before one of them could change other tokens.

    The backend looks for these tokens first, the longest one that begins leftmost, and encodes the text between them by
    itself. Only at the beginning of a text does it do anything else, and there a cut leaves the text as it is.
    """
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if not token.normalized]
    if tokenizer.split_special_tokens or any(
        token.lstrip or token.single_word or token.content != token.content.strip() for token in tokens
    ):
        return None
    texts = sorted((token.content for token in tokens if token.content), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None
