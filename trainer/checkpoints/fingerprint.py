"""Fingerprints of a run's model and data, so that no run is resumed with another model or other data.

This module loads without torch, because collectors run without torch and compare the data, too.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

SAMPLES = 4096
"""Values read of each parameter, evenly spaced, so that a large model takes milliseconds a layer."""

PROBE = "What is 12 + 345?\n\tThe answer is: \\boxed{357}. Größe, 数学, ответ, 🙂  don't <|im_start|>user def f(x):\n"
"""A text with many scripts and symbols, so that its tokens reveal a tokenizer's merges and rules."""


class Fingerprint(BaseModel):
    """The model and data that a run started with. Digests are compared; names appear in messages."""

    model: str
    """MODEL_NAME."""
    weights: str
    tokenizer: str
    dataset: str
    """The data-server's name of its source."""
    data: dict[str, str]
    """The data-server's digests of its prompts, by part; empty where it gives none."""


def weights_digest(model: nn.Module) -> str:
    """Return a digest of samples of every parameter. It does not depend on the file format of the weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        samples = values[:: max(values.numel() // SAMPLES, 1)].float().contiguous().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode() + samples.tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of vocabulary, special tokens, chat template and the tokens of PROBE."""
    content = (
        sorted((number, str(token)) for token, number in tokenizer.get_vocab().items()),
        (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id),
        tokenizer.chat_template,
        tokenizer(PROBE)["input_ids"],
    )
    return hashlib.blake2b(ascii(content).encode(), digest_size=8).hexdigest()


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return a line for each difference of weights, tokenizer and data, with the old and the new value."""
    found = [
        f"the {part} of MODEL_NAME: {before.model!r} (digest {old}) then, {now.model!r} (digest {new}) now"
        for part, old, new in (
            ("weights", before.weights, now.weights),
            ("tokenizer", before.tokenizer, now.tokenizer),
        )
        if old != new
    ]
    return found + data_differences(before, now.dataset, now.data)


def data_differences(before: Fingerprint, dataset: str, data: dict[str, str]) -> list[str]:
    """Return a line for the parts of the data that differ; none when the data-server gave no digests then or now."""
    if not before.data or not data:
        return []
    parts = [
        f"{part} {before.data.get(part, 'unknown')} then, {data.get(part, 'unknown')} now"
        for part in {**before.data, **data}
        if before.data.get(part) != data.get(part)
    ]
    return [f"the data: {before.dataset!r} then, {dataset!r} now; {'; '.join(parts)}"] if parts else []
