"""Completions as engines answer /generate, and the text of those that came in several pieces."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from tokenizers import Tokenizer

from services.core.errors import DependencyLostError, first_line
from services.core.logs import get_logger
from services.core.models import model_file
from services.protocol.groups import Completion, VersionSpan
from services.protocol.rewards import FinishReason

log = get_logger(__name__)


def read_completions(url: str, reply: bytes) -> list[Completion]:
    """Return the completions of ``url``'s reply to SGLang's /generate, which is one record or a list of records.

    Raises:
        DependencyLostError: the reply is something else.
    """
    try:
        body = orjson.loads(reply)
        return [_completion(record) for record in (body if isinstance(body, list) else [body])]
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise DependencyLostError(f"{url} answered with something else than completions: {error}") from error


def _completion(record: dict[str, Any]) -> Completion:
    meta = record["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    ids = [pair[1] for pair in pairs]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
    return Completion(
        completion=record.get("text") or "",
        completion_ids=ids,
        logprobs=[pair[0] for pair in pairs],
        policy_versions=[
            VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"]) for span in spans
        ],
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
    )


class CompletionDecoder:
    """A decoder of completions that came in several pieces, between which the bytes of a character may be cut.

    It loads the model's tokenizer at its first call, because most runs have no such completions.
    """

    def __init__(self, model_name: str) -> None:
        self._load = functools.cache(functools.partial(_load_tokenizer, model_name))
        self._loading = asyncio.Lock()

    async def decode(self, completion: Completion, stop: Sequence[str]) -> Completion:
        """Return a completion with the text that an engine gives for one request: no special tokens, and no ``stop``.

        A model without a tokenizer.json keeps the texts of the pieces.
        """
        async with self._loading:
            tokenizer = await asyncio.to_thread(self._load)
        if tokenizer is None:
            return completion
        return completion.model_copy(update={"completion": _text(tokenizer, completion, stop)})


def _load_tokenizer(model_name: str) -> Tokenizer | None:
    """Load a tokenizer without transformers, which collectors do not have; None, with a warning, if that fails."""
    try:
        return Tokenizer.from_file(str(model_file(model_name, "tokenizer.json")))
    except Exception as error:  # noqa: BLE001  # tokenizers raises no narrower one
        log.warning("characters between pieces of completions stay cut", model=model_name, reason=first_line(error))
        return None


def _text(tokenizer: Tokenizer, completion: Completion, stop: Sequence[str]) -> str:
    """Return a completion's text without special tokens, up to the stop text or stop token that ended it."""
    ids = completion.completion_ids
    text = tokenizer.decode(ids)
    if completion.finish_reason is not FinishReason.STOP:
        return text
    places = [text.find(end) for end in stop if end in text]
    return text[: min(places)] if places else tokenizer.decode(ids[:-1])
