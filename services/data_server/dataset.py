"""A dataset that is ready to serve: its rows as prompts, and the fingerprint by which a run recognises it.

``PromptMaker`` makes what the model sees of a question: instruction, style, chat template, token ids. A ``Catalogue``
has the prompts of one split: rendered once, kept within a bound, those that cannot be used left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import logging as hub_logging

from services.chat.tokenizers import import_transformers_alone, load_tokenizer
from services.core.errors import ConfigurationError, first_line
from services.core.logs import get_logger
from services.core.settings import Method
from services.core.sources import MAIN, Source
from services.data_server import dataset_rows
from services.data_server.dataset_rows import TOO_LONG, DatasetRows, Refusal, Row, Rows, instruction_of
from services.data_server.demonstrations import DemonstrationMaker
from services.data_server.settings import HARBOR, Curriculum, DataSettings, PromptStyle, generator_of
from services.protocol.prompts import ROWS, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

_PROBE = "What is 12 + 345?\n#### 357"


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
        self.tokenizer = tokenizer
        self._system = settings.system_prompt
        self._style = settings.prompt_style
        self._template_args = settings.chat_template_args
        self._examples = examples
        self._most = settings.max_prompt_tokens
        self._instruction = instruction_of(settings, instruction)
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        if self._style is PromptStyle.CHAT and tokenizer is not None and not has_template:
            raise ConfigurationError(
                f"MODEL_NAME {settings.model_name!r} has no chat template; set PROMPT_STYLE=plain or few_shot"
            )
        self._uses_chat = self._style is not PromptStyle.PLAIN and (
            has_template or (tokenizer is None and self._style is PromptStyle.CHAT)
        )
        self._ends = 0 if tokenizer is None or self._uses_chat else _tokens_behind(tokenizer)

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
        """Return the whole prompt as text, before tokenisation.

        Raises:
            ConfigurationError: the chat template raises.
        """
        if self._uses_chat and self.tokenizer is not None:
            try:
                rendered: str = self.tokenizer.apply_chat_template(
                    self.messages(question), add_generation_prompt=True, tokenize=False, **self._template_args
                )
            except Exception as error:  # A template can raise anything.
                remedy = "write SYSTEM_PROMPT as INSTRUCTION, or give" if self._system else "give"
                raise ConfigurationError(
                    f"MODEL_NAME's chat template refuses the prompt: {first_line(error)}; {remedy} PROMPT_STYLE=plain, "
                    "CHAT_TEMPLATE_ARGS or another model"
                ) from error
            return rendered
        parts = [self._system] if self._system else []
        if self._style is PromptStyle.FEW_SHOT:
            parts += [f"Question: {self.user_turn(row.question)}\nAnswer: {row.answer}" for row in self._examples]
            parts.append(f"Question: {self.user_turn(question)}\nAnswer:")
        else:
            parts.append(self.user_turn(question))
        return "\n\n".join(parts)

    def token_ids(self, questions: Sequence[str]) -> list[list[int]]:
        """Return the token ids of whole prompts, without an end token; empty lists without a tokenizer."""
        if self.tokenizer is None:
            return [[] for _ in questions]
        texts = [self.text(question) for question in questions]
        # A chat template writes its own special tokens.
        options = {"add_special_tokens": not self._uses_chat}
        ids: list[list[int]] = self.tokenizer(texts, **options)["input_ids"]
        return [of_text[: len(of_text) - self._ends] for of_text in ids]

    def fields(self, rows: Sequence[Row]) -> list[dict[str, Any] | Refusal]:
        """Return the fields of each row's prompt that a tokenizer and a template make, or why there are none."""
        ids = self.token_ids([row.question for row in rows])
        return [
            {"prompt": self.user_turn(row.question), "prompt_ids": of_row, "messages": self.messages(row.question)}
            if len(of_row) <= self._most
            else Refusal(TOO_LONG, f"row {row.number}: {len(of_row)} tokens; raise MAX_PROMPT_TOKENS={self._most}")
            for row, of_row in zip(rows, ids, strict=True)
        ]

    def digest(self) -> str:
        """Return a digest of everything that turns a question into a prompt: equal digests mean equal prompts.

        The digest does not cover a rendered prompt, because a template may write the date.
        """
        tokenizer = self.tokenizer
        content = (
            (self._style.value, self._uses_chat, self._system, self._instruction),
            [(row.question, row.answer) for row in self._examples],
            None if tokenizer is None else tokenizer.chat_template if self._uses_chat else "",
            None if tokenizer is None else tokenizer(_PROBE, add_special_tokens=not self._uses_chat)["input_ids"],
            *([f"{self._ends} tokens less"] if self._ends else []),
            *([json.dumps(self._template_args, sort_keys=True)] if self._template_args else []),
        )
        return hashlib.blake2b(ascii(content).encode(), digest_size=8).hexdigest()


def _tokens_behind(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that a tokenizer appends to a text, such as an end token."""
    bare, whole = (tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True))
    more = len(whole) - len(bare)
    return next((more - start for start in range(more) if whole[start : start + len(bare)] == bare), 0)


RENDERED_AT_START = 20_000
"""A split of up to this size is rendered at the start, in seconds; a larger one when its prompts are requested."""
_KEPT = 50_000
_BATCH = 256

Record = dict[str, Any]


@dataclass
class Catalogue:
    """A split's prompts in their wire form, rendered when they are needed. A row that is refused then has no form."""

    rows: Rows
    maker: PromptMaker | DemonstrationMaker
    split: Split
    id_prefix: str
    common: Record
    """Fields that all prompts of the split have alike."""
    refusals: dict[int, Refusal] = field(default_factory=dict)
    """Why rows rendered so far have no prompt, by place."""
    _records: OrderedDict[int, Record | None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, place: int) -> Record | None:
        """Return the prompt at ``place`` without its epoch and position; None if it is refused."""
        self.prefetch([place])
        self._records.move_to_end(place)
        return self._records[place]

    def row(self, place: int) -> dict[str, str]:
        """Return the field ``row`` of the prompt at ``place``; no field where rows have no columns to read."""
        # Nobody reads the row of what is learned as it is.
        is_learned = self.rows.has_demonstrations and self.split is Split.TRAIN
        text = None if is_learned else self.rows.text(place)
        return {} if text is None else {"row": text}

    def prefetch(self, places: Sequence[int]) -> None:
        """Render the prompts at ``places`` that are not kept, all at once because that costs less."""
        missing = [place for place in places if place not in self._records]
        if not missing:
            return
        rows = self.rows.take(missing)
        for place, row, fields in zip(missing, rows, self.maker.fields(rows), strict=True):
            if isinstance(fields, Refusal):
                if fields.reason not in {known.reason for known in self.refusals.values()}:
                    log.warning("a row is left out, the first of its kind", reason=fields.sentence)
                self.refusals[place] = fields
                self._records[place] = None
                continue
            record = self._records[place] = {
                "id": f"{self.id_prefix}{row.number}",
                "ground_truth": row.ground_truth,
                "category": row.category,
                **fields,
                **self.common,
            }
            if self.split is Split.TEST:
                record.pop("demonstrations", None)
        while len(self._records) > _KEPT:
            self._records.popitem(last=False)

    def place_of(self, prompt_id: str) -> int | None:
        """Return the place of a prompt by its id, None for an id that is not of this split."""
        number = prompt_id.removeprefix(self.id_prefix)
        if number == prompt_id or not (number.isascii() and number.isdecimal()) or len(number) > 10:
            return None
        place = int(self.rows.numbers.searchsorted(int(number)))
        return place if place < len(self) and self.rows.numbers[place] == int(number) else None


FEW_SHOT_COUNT = 4
"""Solved examples before a question in the few_shot style, as base models are usually asked; not trained on."""


@dataclass(frozen=True)
class Dataset:
    """The prompts of both splits."""

    rows: DatasetRows
    catalogues: dict[Split, Catalogue]
    fingerprint: dict[str, str]
    """A line for each part that a run's place in the prompts depends on: equal lines mean equal prompts, also in files
    of other directories."""

    @property
    def left_out(self) -> dict[str, int]:
        """Rows of the dataset that were left out so far, by reason; always those with too many tokens."""
        refusals = [refusal for catalogue in self.catalogues.values() for refusal in catalogue.refusals.values()]
        return {TOO_LONG: 0} | Counter(self.rows.refused) + Counter(refusal.reason for refusal in refusals)


def load(
    settings: DataSettings, source: Source = MAIN, *, own_process: bool = False, first: int | None = None
) -> Dataset:
    """Load the dataset of a source, and the tokenizer.

    Args:
        settings: name dataset and model, and give the form of the prompts.
        source: the source.
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
    rows = dataset_rows.load(settings, first, eval_only=source.eval_only)
    train = rows.train
    examples: list[dataset_rows.Row] = []
    if settings.prompt_style is PromptStyle.FEW_SHOT:
        examples, train = _examples(settings, train)
    maker = PromptMaker(settings, rows.instruction, tokenizer, examples)
    splits = {Split.TEST: rows.test, Split.TRAIN: train}
    catalogues = _catalogues(settings, rows.name, splits, maker, source)
    dataset = Dataset(rows, catalogues, _fingerprint(settings, splits, maker))
    log.info(
        "loaded",
        dataset=settings.dataset,
        source=source.name or None,
        train=len(train),
        test=len(rows.test),
        refused=rows.refused or None,
        first_refused=rows.first_refused or None,
        only_through_row=rows.shadowed or None,
        left_out=+Counter(dataset.left_out) or None,
    )
    return dataset


def _catalogues(
    settings: DataSettings, name: str, splits: dict[Split, Rows], maker: PromptMaker, source: Source
) -> dict[Split, Catalogue]:
    """Return the catalogue of each split.

    Raises:
        ConfigurationError: no row of a split makes a prompt.
    """
    catalogues: dict[Split, Catalogue] = {}
    common: Record = {"source": source.name} if source.name else {}
    if generator_of(settings.dataset) == HARBOR:
        common["is_task"] = True
    for split, rows in splits.items():
        of_rows: PromptMaker | DemonstrationMaker = maker
        if rows.has_demonstrations and maker.tokenizer is not None:
            of_rows = DemonstrationMaker(settings, maker, maker.tokenizer)
        prefix = f"{source.name or name}/{split.value}/"
        catalogue = catalogues[split] = Catalogue(rows, of_rows, split, prefix, common)
        if len(rows) <= RENDERED_AT_START:
            for start in range(0, len(rows), _BATCH):
                catalogue.prefetch(range(start, min(start + _BATCH, len(rows))))
        if 0 < len(catalogue) == len(catalogue.refusals):
            [first, *_] = catalogue.refusals.values()
            raise ConfigurationError(f"no row of DATASET {settings.dataset!r} can be used: {first.sentence}")
    return catalogues


_load_tokenizer = lru_cache(1)(load_tokenizer)
"""The sources of a run share a tokenizer."""


def _examples(settings: DataSettings, train: dataset_rows.Rows) -> tuple[list[dataset_rows.Row], dataset_rows.Rows]:
    """Return the rows that are shown as examples, and the others.

    Raises:
        ConfigurationError: there are too few rows, or rows without an answer to show.
    """
    if len(train) <= FEW_SHOT_COUNT:
        raise ConfigurationError(
            f"PROMPT_STYLE=few_shot needs more than {FEW_SHOT_COUNT} training rows; DATASET has {len(train)}: give more"
        )
    examples = train.take(list(range(FEW_SHOT_COUNT)))
    if not all(example.answer for example in examples):
        raise ConfigurationError(
            f"PROMPT_STYLE=few_shot shows a right answer, which rows of {settings.dataset!r} lack; give another style"
        )
    return examples, train.select(slice(FEW_SHOT_COUNT, None))


def _fingerprint(settings: DataSettings, splits: dict[Split, dataset_rows.Rows], maker: PromptMaker) -> dict[str, str]:
    train, test = splits[Split.TRAIN], splits[Split.TEST]
    shuffled = "as in the source" if settings.curriculum is Curriculum.SOURCE else "shuffled"
    rows = {ROWS: f"digests {train.texts_digest()}, {test.texts_digest()}"} if train.texts is not None else {}
    method = {} if settings.method is Method.RL else {"method": f"METHOD {settings.method.value}"}
    return (
        rows
        | method
        | {
            "training prompts": f"{len(train)} (digest {train.digest()})",
            "held-out prompts": f"{len(test)} (digest {test.digest()})",
            "order": f"{shuffled}, DATA_SEED {settings.data_seed}, CURRICULUM {settings.curriculum.value}",
            "form": f"PROMPT_STYLE {settings.prompt_style.value}, at most {settings.max_prompt_tokens} tokens "
            f"(digest {maker.digest()})",
        }
    )
