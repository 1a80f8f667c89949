"""The data-server's settings, and the files that they may name."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.core.errors import ConfigurationError
from services.core.settings import (
    AgentColumns,
    Method,
    MethodSettings,
    RewardFunctionSettings,
    RewardWeightSettings,
    SourcesSettings,
    TemplateSettings,
)
from services.protocol.ground_truths import REASONING_GYM
from services.reward_columns import Reads, reads

LARGEST_ROW = 256 * 2**10
"""Bytes. Larger questions would take minutes to tokenise, and fit into no prompt; larger rows would fill requests to
the reward-server and the replay buffer's disk."""
LARGEST_DEMONSTRATION = 8 * 2**20


class PromptStyle(StrEnum):
    """The ways in which a question becomes the prompt that the model sees."""

    CHAT = "chat"
    PLAIN = "plain"
    FEW_SHOT = "few_shot"


class GroundTruthFormat(StrEnum):
    """The places of a ground truth within its column."""

    AUTO = "auto"
    HASH = "hash"
    BOXED = "boxed"
    PLAIN = "plain"


class Curriculum(StrEnum):
    """The orders of prompts within an epoch."""

    OFF = "off"
    SOURCE = "source"
    BALANCED = "balanced"


class DataSettings(
    TemplateSettings, AgentColumns, MethodSettings, RewardWeightSettings, RewardFunctionSettings, SourcesSettings
):
    """The data-server's environment variables."""

    dataset: str = Field("gsm8k", min_length=1)
    """`gsm8k`, `arithmetic` (a built-in generator), `seeds` (of episodes, for ROLLOUT=environment),
    `reasoning_gym:NAME` (a generator of reasoning-gym; SOURCES mixes several), `harbor:DIR` (a directory of tasks in
    Harbor's format, or a file with a directory a line), a Hugging Face dataset id, or a path to a .jsonl or .parquet
    file; with METHOD=sft also to a .groups file, which `grpo groups` writes."""
    dataset_config: str | None = None
    """Configuration name of a Hugging Face dataset. For `reasoning_gym:...` JSON with any of `size` (questions, 1000),
    `levels` (of difficulty, from 0) and the generator's parameters: `{"size": 1000, "levels": [0, 1], "chain_sum":
    {"max_terms": 3}}`. For `arithmetic` JSON with any of `digits` of both operands (`[1, 2]`; unset: 1),
    `operations` (`+`, `-` and `*`, written together; unset: `+`) and the `template` of a question, with `{a}`, `{op}`
    and `{b}`."""
    dataset_train_split: str = "train"
    """Split of a Hugging Face dataset to train on."""
    dataset_test_split: str = "test"
    """Split of a Hugging Face dataset that is held out of training."""
    dataset_test: Path | None = None
    """A .jsonl or .parquet file of held-out prompts, for a DATASET that is a file; a directory of held-out tasks for
    `harbor:DIR`."""
    dataset_held_out: float = Field(0.05, gt=0, lt=1)
    """Share of the questions held out of training, each with all of its rows, for a dataset that has no held-out split
    of its own. With METHOD=sft unset means none."""
    prompt_column: str | None = None
    """Column of the question; default the first of question, prompt, problem."""
    ground_truth_column: str | None = None
    """Column of the answer; default the first of answer, ground_truth, solution. Rows may lack it if no part of
    REWARD_FN reads a ground truth."""
    ground_truth_format: GroundTruthFormat = GroundTruthFormat.AUTO
    """`hash`: after the last `####`; `boxed`: in the last `\\boxed{}`; `plain`: the whole column; `auto`: the
    format of most rows. Rows without a ground truth are left out and counted, if a part of REWARD_FN reads one."""

    model_name: str | None = None
    """Model whose tokenizer and chat template make `prompt_ids`, by hub name or directory. Unset: prompts come as
    text only."""
    prompt_style: PromptStyle = PromptStyle.CHAT
    """`chat`: the tokenizer's chat template; `plain`: the text as it is; `few_shot`: after four solved examples, as
    turns where the tokenizer has a chat template and as text where it has none."""
    system_prompt: str | None = None
    """System turn of the chat, or first paragraph of a plain prompt."""
    instruction: str | None = None
    """Appended to every question on a line of its own. Default: asks for steps and the answer in the form of the
    ground truths (`####` or `\\boxed{}`, `<answer>` for `reasoning_gym:...`), nothing where they are plain; `none`
    appends nothing."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Longer prompts are passed over and counted; with METHOD=sft, longer rows."""

    data_seed: int = Field(0, ge=0)
    """Seed of the shuffled order, of generated questions and of their split."""
    curriculum: Curriculum = Curriculum.OFF
    """Order of the prompts within an epoch. `off`: a random order of its own for each epoch; `source`: the order of
    the dataset, which for `reasoning_gym:...` has the easier levels first; `balanced`: prompts whose recorded success
    rates are near one half come earlier. Each prompt comes once an epoch."""

    @property
    def reads(self) -> dict[str, Reads]:
        """The columns that each part of REWARD_FN reads, by its name."""
        return reads(self.reward_fn, self.judge_rubric)

    @property
    def needs_truth(self) -> bool:
        """True if rewards are used (METHOD, REWARD_WEIGHT) and a part of REWARD_FN reads the ground truth."""
        return (
            self.method is Method.RL and self.reward_weight > 0 and any(part.has_truth for part in self.reads.values())
        )

    @model_validator(mode="after")
    def _belongs_to_dataset(self) -> Self:
        given = [name.upper() for name in ("dataset_config", "dataset_test") if getattr(self, name) is not None]
        if given and self.sources and all("dataset" in source.settings for source in self._sources):
            raise ValueError(
                f"{given[0]} is set, but each source in SOURCES has a dataset of its own; write it as "
                f"{given[0].lower()} under the source that it belongs to"
            )
        return self

    @model_validator(mode="after")
    def _shows_no_examples(self) -> Self:
        if self.method is Method.SFT and self.prompt_style is PromptStyle.FEW_SHOT:
            raise ValueError("PROMPT_STYLE is few_shot, but METHOD=sft learns rows as they are; set chat or plain")
        return self

    @property
    def largest_row(self) -> int:
        """Bytes of a row, a question or a ground truth; what is learned as it is may be longer."""
        return LARGEST_DEMONSTRATION if self.method is Method.SFT else LARGEST_ROW


HARBOR = "harbor:"
"""The beginning of a DATASET that names tasks in Harbor's format."""
GENERATORS = ("arithmetic", "seeds", REASONING_GYM, HARBOR)
"""The values of DATASET that name a generator or tasks; one that ends with a colon has its own parameters behind it."""
GROUPS = ".groups"
"""The end of the name of a file that `grpo groups` has written, whose groups METHOD=sft trains on."""
FILE_TYPES = (".jsonl", ".parquet")
_OTHER = (".csv", ".tsv", ".json")
"""The ends of names of files that people have and that have to be converted."""


def is_path(dataset: str) -> bool:
    """Return whether DATASET names a file: a dataset on the hub has one slash at most, and no file's ending."""
    if generator_of(dataset) is not None:
        return False
    looks_like_path = Path(dataset).suffix in (*FILE_TYPES, GROUPS, *_OTHER) or dataset.startswith(
        ("/", "./", "../", "~")
    )
    return looks_like_path or dataset.count("/") > 1 or os.path.isfile(dataset)


def is_on_hub(dataset: str) -> bool:
    """Return whether DATASET names a dataset on the Hugging Face hub."""
    return not is_path(dataset) and generator_of(dataset) is None


def generator_of(dataset: str) -> str | None:
    """Return the name in GENERATORS that DATASET has; None for a file or a dataset on the hub."""
    for name in GENERATORS:
        if dataset == name or (name.endswith(":") and dataset.startswith(name)):
            return name
    return None


def named_files(settings: DataSettings) -> dict[str, Path]:
    """Return the files that the settings name, by variable; none for a generator or a dataset on the hub.

    Raises:
        ConfigurationError: DATASET_TEST names a file, but DATASET does not.
    """
    if not is_path(settings.dataset):
        if generator_of(settings.dataset) is None and os.path.isdir(settings.dataset):
            remedy = f"name a file in it, or {HARBOR}{settings.dataset} if it has tasks"
            raise ConfigurationError(f"DATASET {settings.dataset!r} is a directory in {Path.cwd()}; {remedy}")
        if settings.dataset_test is not None and generator_of(settings.dataset) != HARBOR:
            raise ConfigurationError(
                f"DATASET_TEST is {str(settings.dataset_test)!r}, but DATASET {settings.dataset!r} is not a file; "
                "leave out DATASET_TEST (DATASET_TEST_SPLIT names the held-out split of a dataset on the hub)"
            )
        return {}
    held_out = {"DATASET_TEST": settings.dataset_test} if settings.dataset_test else {}
    return {"DATASET": Path(settings.dataset)} | held_out


def check_file(variable: str, path: Path) -> None:
    """Check that ``path``, the value of ``variable``, is a file that may have rows, by its name and its first byte.

    Raises:
        ConfigurationError: it cannot be read, is empty, or has another file type; the message says how to convert it.
    """
    where = f"{variable} {str(path)!r}"
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        raise ConfigurationError(f"{where} is an address, which is not read; download the file and give its path")
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{where} is not a file, seen from {Path.cwd()}; give the path of one") from error
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read ({error.strerror}); give a file that can be") from error
    if path.suffix not in (*FILE_TYPES, GROUPS):
        reader = "read_json" if path.suffix == ".json" else "read_csv"
        raise ConfigurationError(
            f"{where}: allowed are files that end in {' or '.join(FILE_TYPES)}; write one, such as by "
            f"pandas.{reader}({str(path)!r}, dtype=str).to_json('rows.jsonl', orient='records', lines=True)"
        )
    if not first:
        raise ConfigurationError(f"{where} is empty; write a JSON object a line, with a question and an answer")
