"""A dataset made ready to be served: its rows as prompts, and the fingerprint by which a run knows it again."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub.utils import logging as hub_logging

from services.chat.tokenizers import import_transformers_alone, load_tokenizer
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.data_server import sources
from services.data_server.catalogue import Catalogue
from services.data_server.prompts import PromptMaker
from services.data_server.settings import Curriculum, DataSettings, PromptStyle
from services.protocol.prompts import Split

log = get_logger(__name__)

FEW_SHOT_COUNT = 4
"""Solved examples before a question in the few_shot style, as base models are usually asked; not trained on."""


@dataclass(frozen=True)
class Dataset:
    """The prompts of both splits."""

    name: str
    catalogues: dict[Split, Catalogue]
    rows: int
    """Number of the source's rows, those that were left out included."""
    refused: dict[str, int]
    """Rows of the source that were left out, by reason."""
    fingerprint: dict[str, str]
    """A line for each part that a run's place in the prompts depends on: equal lines mean equal prompts, wherever the
    files lie."""

    @property
    def too_long(self) -> int:
        """Number of prompts met so far that have too many tokens."""
        return sum(catalogue.too_long for catalogue in self.catalogues.values())


def load(settings: DataSettings, *, own_process: bool = False, first: int | None = None) -> Dataset:
    """Load the dataset and the tokenizer. A process of the data-server's ``own`` imports transformers without torch.

    Args:
        settings: name dataset and model, and give the form of the prompts.
        own_process: whether this process does nothing else.
        first: the number of rows to load of each split of a dataset on the hub; None: all.

    Raises:
        ConfigurationError: one of them cannot be loaded, or no prompt can be made.
    """
    # Each retry would be a warning, printed twice. The last error is in our own message.
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if own_process and settings.model_name is not None:
        import_transformers_alone()
    # The tokenizer comes first because it fails sooner.
    tokenizer = None if settings.model_name is None else load_tokenizer(settings.model_name)
    source = sources.load(settings, first)
    train = source.train
    examples: list[sources.Row] = []
    if settings.prompt_style is PromptStyle.FEW_SHOT:
        examples, train = _examples(settings, train)
    maker = PromptMaker(settings, source.instruction, tokenizer, examples)
    splits = {Split.TRAIN: train, Split.TEST: source.test}
    catalogues = {
        split: Catalogue(source.name, split, rows, maker, settings.max_prompt_tokens) for split, rows in splits.items()
    }
    for catalogue in catalogues.values():
        catalogue.render_all_if_few()
        if catalogue.too_long == len(catalogue):
            raise ConfigurationError(
                f"MAX_PROMPT_TOKENS is {settings.max_prompt_tokens}, but every prompt of DATASET "
                f"{settings.dataset!r} is longer; allow more"
            )
    dataset = Dataset(source.name, catalogues, source.rows, source.refused, _fingerprint(settings, splits, maker))
    log.info(
        "loaded",
        dataset=settings.dataset,
        train=len(train),
        test=len(source.test),
        refused=source.refused or None,
        too_long=dataset.too_long or None,
    )
    return dataset


def _examples(settings: DataSettings, train: sources.Rows) -> tuple[list[sources.Row], sources.Rows]:
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


def _fingerprint(settings: DataSettings, splits: dict[Split, sources.Rows], maker: PromptMaker) -> dict[str, str]:
    train, test = splits[Split.TRAIN], splits[Split.TEST]
    shuffled = "as in the source" if settings.curriculum is Curriculum.SOURCE else "shuffled"
    return {
        "training prompts": f"{len(train)} (digest {train.digest()})",
        "held-out prompts": f"{len(test)} (digest {test.digest()})",
        "order": f"{shuffled}, DATA_SEED {settings.data_seed}, CURRICULUM {settings.curriculum.value}",
        "form": f"PROMPT_STYLE {settings.prompt_style.value}, at most {settings.max_prompt_tokens} tokens "
        f"(digest {maker.digest()})",
    }
