"""The data-server's settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from string import Formatter

from pydantic import Field, field_validator

from services.core.settings import Settings


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
    EASY_FIRST = "easy_first"
    HARD_FIRST = "hard_first"


class DataSettings(Settings):
    """The data-server's environment variables."""

    dataset: str = Field(
        default="gsm8k",
        min_length=1,
        description="`gsm8k`, `arithmetic` (a built-in generator), a Hugging Face dataset id, or a path to a .jsonl or "
        ".parquet file.",
    )
    dataset_config: str | None = Field(default=None, description="Configuration name of a Hugging Face dataset.")
    dataset_train_split: str = Field(default="train", description="Split of a Hugging Face dataset to train on.")
    dataset_test_split: str = Field(
        default="test", description="Split of a Hugging Face dataset that is held out of training."
    )
    dataset_test: Path | None = Field(
        default=None, description="A .jsonl or .parquet file of held-out prompts beside a file given as DATASET."
    )
    dataset_held_out: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Share of the rows held out of training, for a source that has no held-out split of its own.",
    )
    prompt_column: str | None = Field(
        default=None, description="Column of the question; default the first of question, prompt, problem."
    )
    ground_truth_column: str | None = Field(
        default=None, description="Column of the answer; default the first of answer, ground_truth, solution."
    )
    ground_truth_format: GroundTruthFormat = Field(
        default=GroundTruthFormat.AUTO,
        description="`hash`: after the last `####`; `boxed`: in the last `\\boxed{}`; `plain`: the whole column; "
        "`auto`: the format of most rows. Rows without a ground truth are left out and counted.",
    )

    model_name: str | None = Field(
        default=None,
        description="Model whose tokenizer and chat template make `prompt_ids`, by hub name or directory. Unset: "
        "prompts come as text only.",
    )
    prompt_style: PromptStyle = Field(
        default=PromptStyle.CHAT,
        description="`chat`: the tokenizer's chat template; `plain`: the text as it is; `few_shot`: after four solved "
        "examples, as turns where the tokenizer has a chat template and as text where it has none.",
    )
    system_prompt: str | None = Field(
        default=None, description="System turn of the chat, or first paragraph of a plain prompt."
    )
    instruction: str | None = Field(
        default=None,
        description="Appended to every question on a line of its own. Default: asks for steps and the answer in the "
        "form of the ground truths (`####` or `\\boxed{}`), nothing where they are plain; `none` appends nothing.",
    )
    max_prompt_tokens: int = Field(default=4096, ge=1, description="Longer prompts are passed over and counted.")

    data_seed: int = Field(
        default=0, ge=0, description="Seed of the shuffled order and of the arithmetic questions' split."
    )
    curriculum: Curriculum = Field(
        default=Curriculum.OFF,
        description="Order of the prompts within an epoch. `off`: a random order of its own for each epoch; `source`: "
        "the order of the source. By recorded success rates: `balanced` has prompts near one half earlier, "
        "`easy_first` the often solved ones, `hard_first` the seldom solved ones. Each prompt comes once an epoch.",
    )

    arithmetic_digits: str = Field(
        default="1",
        pattern=r"^[123](,[123])*$",
        description="Digits of both operands; several levels with commas: `1,2`.",
    )
    arithmetic_operations: str = Field(
        default="+", pattern=r"^[-+*]+$", description="Which of `+`, `-` and `*` occur, written together."
    )
    arithmetic_template: str = Field(
        default="What is {a} {op} {b}? Answer with just the number.",
        description="The arithmetic question, with `{a}`, `{op}` and `{b}`.",
    )

    @field_validator("arithmetic_template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if not {"a", "b"} <= fields <= {"a", "op", "b"}:
            raise ValueError("allowed are the fields {a}, {op} and {b}, of which {a} and {b} are needed")
        template.format(a=1, op="+", b=2)
        return template
