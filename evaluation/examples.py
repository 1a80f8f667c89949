"""The prompts that are evaluated, made by the data-server's own code: the same rows, template and token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.core.errors import ConfigurationError
from services.data_server import app, sources
from services.data_server.settings import DataSettings
from services.protocol import Prompt, Split

ALL = "all"


@dataclass(frozen=True)
class Examples:
    """The prompts of a split, in the order of the source; ``too_long`` more have more than MAX_PROMPT_TOKENS."""

    prompts: list[Prompt]
    too_long: int
    recipe: dict[str, Any]
    """What the prompts depend on: an evaluation of other prompts is another evaluation."""


def load(dataset: str | None, split: str, model: str, limit: int, *, own_process: bool) -> Examples:
    """Loads the first ``limit`` prompts (0: all) of a split: ``train``, ``test``, ``all`` or, on the hub, any other.

    Raises:
        ConfigurationError: dataset, split or tokenizer cannot be had.
    """
    settings = _settings(dataset, split, model)
    data = app.load(settings, own_process=own_process)
    splits = [Split.TRAIN, Split.TEST] if split == ALL else [Split.TRAIN if split == Split.TRAIN else Split.TEST]
    prompts: list[Prompt] = []
    too_long = 0
    for one in splits:
        catalogue = data.catalogues[one]
        for place in range(len(catalogue)):
            if limit and len(prompts) >= limit:
                break
            record = catalogue.record(place)
            if record is None:
                too_long += 1
            else:
                prompts.append(Prompt.model_validate(record))
    data.state.close()
    fields = DataSettings.model_fields.keys() - {"shared_dir"}
    recipe = settings.model_dump(
        mode="json",
        include=fields - {"run_id", "log_level", "log_format", "jobgroup_token", "dataset_cache_dir", "model_name"},
    )
    return Examples(prompts, too_long, {**recipe, "split": split})


def _settings(dataset: str | None, split: str, model: str) -> DataSettings:
    given: dict[str, Any] = {"dataset": dataset, "model_name": model, "data_shuffle": False}
    settings = DataSettings.load(**given)
    if split in (Split.TRAIN, Split.TEST, ALL):
        return settings
    if settings.dataset == "arithmetic" or sources.is_path(settings.dataset):
        raise ConfigurationError(
            f"--split {split!r}: DATASET {settings.dataset!r} has the splits train, test and all; give one of them"
        )
    return DataSettings.load(**given, dataset_test_split=split)
