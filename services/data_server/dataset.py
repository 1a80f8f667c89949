"""A dataset that is ready to serve: its rows as prompts, and the fingerprint by which a run recognises it.

``PromptMaker`` turns a question into what the model sees: instruction, style, chat template, token ids. A ``Catalogue``
has the prompts of one split: rendered once, kept within a bound, overlong ones left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import logging as hub_logging

from services.chat.tokenizers import import_transformers_alone, load_tokenizer
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.sources import Source
from services.data_server import dataset_rows
from services.data_server.dataset_rows import Row, Rows
from services.data_server.settings import Curriculum, DataSettings, PromptStyle
from services.protocol.prompts import ROWS, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

_PROBE = "What is 12 + 345?\n#### 357"
_WORTH_THREADS = 128
"""A fast tokenizer spreads a list over threads. For fewer texts, waiting for the threads costs more than it gains."""


class PromptMaker:
    """A renderer of questions as messages, text and token ids, by the settings."""

    def __init__(
        self,
        settings: DataSettings,
        instruction: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
        examples: Sequence[Row],
    ) -> None:
        """Make the renderer; ``instruction`` is the dataset's, which INSTRUCTION replaces.

        Raises:
            ConfigurationError: the style needs a chat template and the tokenizer has none.
        """
        self._tokenizer = tokenizer
        self._system = settings.system_prompt
        self._style = settings.prompt_style
        self._template_args = settings.chat_template_args
        self._examples = examples
        self._instruction = instruction if settings.instruction is None else settings.instruction
        if self._instruction is not None and self._instruction.lower() == "none":
            self._instruction = None
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        if self._style is PromptStyle.CHAT and tokenizer is not None and not has_template:
            raise ConfigurationError(
                f"the tokenizer of MODEL_NAME {settings.model_name!r} has no chat template; set PROMPT_STYLE=plain or "
                f"few_shot, or give a chat model"
            )
        self._uses_chat = self._style is not PromptStyle.PLAIN and (
            has_template or (tokenizer is None and self._style is PromptStyle.CHAT)
        )

    def user_turn(self, question: str) -> str:
        """Return the question with the instruction."""
        return f"{question}\n{self._instruction}" if self._instruction else question

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the conversation up to the answer: one user turn where the style is not a chat."""
        turns: list[dict[str, str]] = []
        if self._uses_chat:
            if self._system:
                turns.append({"role": "system", "content": self._system})
            for example in self._examples:
                turns.append({"role": "user", "content": self.user_turn(example.question)})
                turns.append({"role": "assistant", "content": example.answer})
        turns.append({"role": "user", "content": self.user_turn(question)})
        return turns

    def text(self, question: str) -> str:
        """Return the whole prompt as text, before tokenisation."""
        if self._uses_chat and self._tokenizer is not None:
            rendered: str = self._tokenizer.apply_chat_template(
                self.messages(question), add_generation_prompt=True, tokenize=False, **self._template_args
            )
            return rendered
        parts = [self._system] if self._system else []
        if self._style is PromptStyle.FEW_SHOT:
            parts += [f"Question: {self.user_turn(row.question)}\nAnswer: {row.answer}" for row in self._examples]
            parts.append(f"Question: {self.user_turn(question)}\nAnswer:")
        else:
            parts.append(self.user_turn(question))
        return "\n\n".join(parts)

    def token_ids(self, questions: Sequence[str]) -> list[list[int]]:
        """Return the token ids of whole prompts; empty lists without a tokenizer."""
        if self._tokenizer is None:
            return [[] for _ in questions]
        texts = [self.text(question) for question in questions]
        # A chat template writes its own special tokens.
        options = {"add_special_tokens": not self._uses_chat}
        if len(texts) >= _WORTH_THREADS:
            ids: list[list[int]] = self._tokenizer(texts, **options)["input_ids"]
            return ids
        return [self._tokenizer(text, **options)["input_ids"] for text in texts]

    def digest(self) -> str:
        """Return a digest of everything that turns a question into a prompt: equal digests mean equal prompts.

        The digest does not cover a rendered prompt, because a template may write the date.
        """
        tokenizer = self._tokenizer
        content = (
            (self._style.value, self._uses_chat, self._system, self._instruction),
            [(row.question, row.answer) for row in self._examples],
            None if tokenizer is None else tokenizer.chat_template if self._uses_chat else "",
            None if tokenizer is None else tokenizer(_PROBE, add_special_tokens=not self._uses_chat)["input_ids"],
            *([json.dumps(self._template_args, sort_keys=True)] if self._template_args else []),
        )
        return hashlib.blake2b(ascii(content).encode(), digest_size=8).hexdigest()


RENDERED_AT_START = 20_000
"""A split of up to this size is rendered at the start, in seconds; a larger one when its prompts are requested."""
_KEPT = 50_000
_BATCH = 256

Record = dict[str, Any]


class Catalogue:
    """A split's prompts in their wire form, rendered when they are needed. A prompt of too many tokens has no form."""

    def __init__(
        self, name: str, split: Split, rows: Rows, maker: PromptMaker, max_prompt_tokens: int, source: Source | None
    ) -> None:
        self._id_prefix = f"{source.name if source else name}/{split.value}/"
        self._source = {"source": source.name} if source else {}
        self._rows = rows
        self._maker = maker
        self._max_prompt_tokens = max_prompt_tokens
        self._records: OrderedDict[int, Record | None] = OrderedDict()
        self._too_long: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def too_long(self) -> int:
        """Number of prompts rendered so far that have too many tokens."""
        return len(self._too_long)

    def render_all_if_few(self) -> None:
        """Render the whole split where it is small, so that no request waits for it."""
        if len(self) <= RENDERED_AT_START:
            for start in range(0, len(self), _BATCH):
                self.prefetch(range(start, min(start + _BATCH, len(self))))

    def record(self, place: int) -> Record | None:
        """Return the prompt at ``place`` without its epoch and position; None if it has too many tokens."""
        self.prefetch([place])
        self._records.move_to_end(place)
        return self._records[place]

    def row(self, place: int) -> dict[str, str]:
        """Return the field ``row`` of the prompt at ``place``; no field where rows have no columns to read."""
        text = self._rows.text(place)
        return {} if text is None else {"row": text}

    def prefetch(self, places: Sequence[int]) -> None:
        """Render the prompts at ``places`` that are not kept, all at once because that costs less."""
        missing = [place for place in places if place not in self._records]
        if not missing:
            return
        rows = self._rows.take(missing)
        ids = self._maker.token_ids([row.question for row in rows])
        for place, row, prompt_ids in zip(missing, rows, ids, strict=True):
            if len(prompt_ids) > self._max_prompt_tokens:
                self._too_long.add(place)
                self._records[place] = None
                continue
            self._records[place] = {
                "id": f"{self._id_prefix}{row.number}",
                "prompt": self._maker.user_turn(row.question),
                "ground_truth": row.ground_truth,
                "prompt_ids": prompt_ids,
                "messages": self._maker.messages(row.question),
                "category": row.category,
                **self._source,
            }
        while len(self._records) > _KEPT:
            self._records.popitem(last=False)

    def place_of(self, prompt_id: str) -> int | None:
        """Return the place of a prompt by its id, None for an id that is not of this split."""
        number = prompt_id.removeprefix(self._id_prefix)
        if number == prompt_id or not (number.isascii() and number.isdecimal()) or len(number) > 10:
            return None
        place = int(self._rows.numbers.searchsorted(int(number)))
        return place if place < len(self) and self._rows.numbers[place] == int(number) else None


FEW_SHOT_COUNT = 4
"""Solved examples before a question in the few_shot style, as base models are usually asked; not trained on."""


@dataclass(frozen=True)
class Dataset:
    """The prompts of both splits."""

    source: str
    """The name in SOURCES, "" without SOURCES."""
    name: str
    """The dataset's own name."""
    catalogues: dict[Split, Catalogue]
    rows: int
    """Number of the dataset's rows, those that were left out included."""
    refused: dict[str, int]
    """Rows of the dataset that were left out, by reason."""
    first_refused: dict[str, int]
    """The number of the first of them, from 0 on, by reason."""
    columns: Sequence[str]
    """The columns of whole rows; none where these do not travel."""
    shadowed: Sequence[str]
    """Columns that rewards reach only through `row`, because their names are reserved."""
    fingerprint: dict[str, str]
    """A line for each part that a run's place in the prompts depends on: equal lines mean equal prompts, also in files
    of other directories."""

    @property
    def too_long(self) -> int:
        """Number of prompts rendered so far that have too many tokens."""
        return sum(catalogue.too_long for catalogue in self.catalogues.values())


def load(
    settings: DataSettings, source: Source | None = None, *, own_process: bool = False, first: int | None = None
) -> Dataset:
    """Load the dataset of a source, and the tokenizer.

    Args:
        settings: name dataset and model, and give the form of the prompts.
        source: the source, None without SOURCES.
        own_process: whether this process does nothing else, so that it can import transformers without torch.
        first: the number of rows to load of each split of a dataset on the hub; None: all.

    Raises:
        ConfigurationError: one of them cannot be loaded, or no prompt can be made.
    """
    # Each retry would be a warning, printed twice. The last error is in our own message.
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if own_process and settings.model_name is not None:
        import_transformers_alone()
    # The tokenizer comes first because it fails sooner.
    tokenizer = None if settings.model_name is None else _load_tokenizer(settings.model_name)
    eval_only = source is not None and source.eval_only
    rows = dataset_rows.load(settings, first, eval_only=eval_only)
    train = rows.train
    examples: list[dataset_rows.Row] = []
    if settings.prompt_style is PromptStyle.FEW_SHOT:
        examples, train = _examples(settings, train)
    maker = PromptMaker(settings, rows.instruction, tokenizer, examples)
    splits = {Split.TRAIN: train, Split.TEST: rows.test}
    catalogues = {
        split: Catalogue(rows.name, split, chosen, maker, settings.max_prompt_tokens, source)
        for split, chosen in splits.items()
    }
    for catalogue in catalogues.values():
        catalogue.render_all_if_few()
        if 0 < len(catalogue) == catalogue.too_long:
            raise ConfigurationError(
                f"MAX_PROMPT_TOKENS is {settings.max_prompt_tokens}, but every prompt of DATASET "
                f"{settings.dataset!r} is longer; allow more"
            )
    fingerprint = _fingerprint(settings, splits, maker)
    dataset = Dataset(
        source.name if source else "",
        rows.name,
        catalogues,
        rows.rows,
        rows.refused,
        rows.first_refused,
        rows.columns,
        rows.shadowed,
        fingerprint,
    )
    log.info(
        "loaded",
        dataset=settings.dataset,
        source=dataset.source or None,
        train=len(train),
        test=len(rows.test),
        refused=rows.refused or None,
        first_refused=rows.first_refused or None,
        only_through_row=rows.shadowed or None,
        too_long=dataset.too_long or None,
    )
    return dataset


_load_tokenizer = lru_cache(1)(load_tokenizer)
"""The sources of a run share a tokenizer."""


def _examples(settings: DataSettings, train: dataset_rows.Rows) -> tuple[list[dataset_rows.Row], dataset_rows.Rows]:
    """Return the rows that are shown as examples, and the others.

    Raises:
        ConfigurationError: there are too few rows, or rows without an answer to show.
    """
    if len(train) <= FEW_SHOT_COUNT:
        raise ConfigurationError(
            f"PROMPT_STYLE is few_shot, which needs more than {FEW_SHOT_COUNT} training rows, but DATASET has "
            f"{len(train)}; give more rows or another style"
        )
    examples = train.take(list(range(FEW_SHOT_COUNT)))
    if not all(example.answer for example in examples):
        raise ConfigurationError(
            f"PROMPT_STYLE is few_shot, but DATASET {settings.dataset!r} has questions with no single right answer "
            f"to show as an example; give another style"
        )
    return examples, train.select(slice(FEW_SHOT_COUNT, None))


def _fingerprint(settings: DataSettings, splits: dict[Split, dataset_rows.Rows], maker: PromptMaker) -> dict[str, str]:
    train, test = splits[Split.TRAIN], splits[Split.TEST]
    shuffled = "as in the source" if settings.curriculum is Curriculum.SOURCE else "shuffled"
    rows = {ROWS: f"digests {train.texts_digest()}, {test.texts_digest()}"} if train.texts is not None else {}
    return rows | {
        "training prompts": f"{len(train)} (digest {train.digest()})",
        "held-out prompts": f"{len(test)} (digest {test.digest()})",
        "order": f"{shuffled}, DATA_SEED {settings.data_seed}, CURRICULUM {settings.curriculum.value}",
        "form": f"PROMPT_STYLE {settings.prompt_style.value}, at most {settings.max_prompt_tokens} tokens "
        f"(digest {maker.digest()})",
    }
