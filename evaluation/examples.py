"""The prompts of an evaluation, made by the data-server's own code: the same rows, chat template and token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.core.settings import Settings
from services.data_server.dataset import load as load_dataset
from services.data_server.settings import DataSettings
from services.protocol.prompts import Prompt, Split

ALL = "all"
_NOT_IN_RECIPE = {*Settings.model_fields, "model_name"}


@dataclass(frozen=True)
class Examples:
    """The prompts of a split, in the order of the source."""

    prompts: list[Prompt]
    available: int
    """Rows of the split, of which ``prompts`` are the first that are wanted."""
    too_long: int
    """Further prompts, which have more than MAX_PROMPT_TOKENS tokens."""
    recipe: dict[str, Any]
    """The settings that the prompts depend on: other prompts make another evaluation."""


def load(split: str, model: str | None, limit: int) -> Examples:
    """Load the first ``limit`` prompts (0: all) of a split: ``train``, ``test`` or ``all``.

    Without a ``model`` they have messages, and no token ids.

    Raises:
        ConfigurationError: the dataset or the tokenizer of ``model`` cannot be loaded.
    """
    settings = DataSettings.load(model_name=model)
    # As in a data-server's own process, transformers is imported without torch, which saves seconds.
    catalogues = load_dataset(settings, own_process=True).catalogues
    chosen = list(Split) if split == ALL else [Split(split)]
    prompts: list[Prompt] = []
    too_long = 0
    for catalogue, place in ((catalogues[one], place) for one in chosen for place in range(len(catalogues[one]))):
        if limit and len(prompts) >= limit:
            break
        record = catalogue.record(place)
        if record is None:
            too_long += 1
        else:
            prompts.append(Prompt.model_validate(record))
    recipe = settings.model_dump(mode="json", exclude=_NOT_IN_RECIPE, exclude_none=True)
    available = sum(len(catalogues[one]) for one in chosen)
    return Examples(prompts, available, too_long, {**recipe, "split": split})
