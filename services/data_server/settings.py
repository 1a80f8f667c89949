"""The data-server's settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from string import Formatter

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.core.settings import JsonObject, Settings


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

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    dataset: str = Field("gsm8k", min_length=1)
    """`gsm8k`, `arithmetic` (a built-in generator), `seeds` (of episodes, for ROLLOUT=environment),
    `reasoning_gym:NAME` (generators of reasoning-gym, several with weights: `reasoning_gym:chain_sum=2,countdown=1`), a
    Hugging Face dataset id, or a path to a .jsonl or .parquet file."""
    dataset_config: str | None = None
    """Configuration name of a Hugging Face dataset. For `reasoning_gym:...` JSON with any of `size` (questions, 1000),
    `levels` (of difficulty, from 0) and parameters by generator: `{"size": 1000, "levels": [0, 1], "chain_sum":
    {"max_terms": 3}}`."""
    dataset_train_split: str = "train"
    """Split of a Hugging Face dataset to train on."""
    dataset_test_split: str = "test"
    """Split of a Hugging Face dataset that is held out of training."""
    dataset_test: Path | None = None
    """A .jsonl or .parquet file of held-out prompts beside a file given as DATASET."""
    dataset_held_out: float = Field(0.05, gt=0, lt=1)
    """Share of the rows held out of training, for a source that has no held-out split of its own."""
    prompt_column: str | None = None
    """Column of the question; default the first of question, prompt, problem."""
    ground_truth_column: str | None = None
    """Column of the answer; default the first of answer, ground_truth, solution."""
    ground_truth_format: GroundTruthFormat = GroundTruthFormat.AUTO
    """`hash`: after the last `####`; `boxed`: in the last `\\boxed{}`; `plain`: the whole column; `auto`: the
    format of most rows. Rows without a ground truth are left out and counted."""

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
    chat_template_args: JsonObject = Field(default_factory=dict)
    """Arguments of the chat template as a JSON object, such as `{"enable_thinking": false}`; the gateway and the
    evaluation have the same variable."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Longer prompts are passed over and counted."""

    data_seed: int = Field(0, ge=0)
    """Seed of the shuffled order, of generated questions and of their split."""
    curriculum: Curriculum = Curriculum.OFF
    """Order of the prompts within an epoch. `off`: a random order of its own for each epoch; `source`: the order of
    the source, which for `reasoning_gym:...` has the easier levels first. By recorded success rates: `balanced` has
    prompts near one half earlier, `easy_first` the often solved ones, `hard_first` the seldom solved ones. Each
    prompt comes once an epoch."""

    arithmetic_digits: str = Field("1", pattern=r"^[123](,[123])*$")
    """Digits of both operands; several levels with commas: `1,2`."""
    arithmetic_operations: str = Field("+", pattern=r"^[-+*]+$")
    """Which of `+`, `-` and `*` occur, written together."""
    arithmetic_template: str = "What is {a} {op} {b}? Answer with just the number."
    """The arithmetic question, with `{a}`, `{op}` and `{b}`."""

    @field_validator("arithmetic_template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if not {"a", "b"} <= fields <= {"a", "op", "b"}:
            raise ValueError("allowed are the fields {a}, {op} and {b}, of which {a} and {b} are needed")
        template.format(a=1, op="+", b=2)
        return template
