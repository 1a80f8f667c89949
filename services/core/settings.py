"""The base of every settings class: typed, read from environment variables, and strict.

Each service and the trainer has one subclass. What several of them read is declared here once. The text below a field
is its documentation, from which docs/configuration.md is generated. ``sky jobs launch jobgroup.yaml --env NAME=VALUE``
gives every task the same variables, so a class ignores variables of the other classes. A value that is not allowed
stops the program.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, JsonValue, PrivateAttr, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.core.errors import ConfigurationError
from services.core.machine import KeepMemory
from services.core.removed import removed_among
from services.core.run_ids import RUN_ID, default_run_id
from services.core.sources import MAIN, Schedule, Source, load_sources


def _parse_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"give JSON ({error})") from error


JsonObject = Annotated[dict[str, JsonValue], NoDecode, BeforeValidator(_parse_json)]
"""A setting that is a JSON object."""
JsonTexts = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_parse_json)]
"""A setting that is a JSON list of texts."""


Result = TypeVar("Result")

SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|AUTHORIZATION)$", re.IGNORECASE)
"""The ends of the names of variables, and of fields of JSON, that hold secrets."""
_USER_IN_URL = re.compile(r"(?:^|,)\s*+[a-z][a-z+.-]*://[^/?#\s]*@", re.IGNORECASE)

ADVANCED = "[advanced]"
"""The end of the text of a setting that hardly any run has a reason to change; docs/configuration.md lists it apart."""


class Settings(BaseSettings):
    """The settings of every component."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    read_with: ClassVar[str] = ""
    """The choice with which the variables of this class are read, as in ``ROLLOUT=agent|program``, or the name of a
    variable that is set to anything but 0; several are joined by " and ". Without it its variables are unknown."""

    jobgroup_token: SecretStr | None = None
    """When set, every route but /health asks for `Authorization: Bearer <token>`."""
    shared_dir: Path = Path("shared-volume")
    """The volume that the nodes of a job share; holds `runs/`."""
    run_id: str = Field(
        default_factory=lambda values: default_run_id(values["shared_dir"]),
        pattern=RUN_ID,
    )
    """Name of the run directory below `SHARED_DIR/runs`. Give a former run's name to resume it. Default: group, job and
    time of SKYPILOT_TASK_ID, such as grpo-17-20260131-120000, equal in all tasks of a managed job and after its
    recoveries."""
    log_level: str = Field("info", pattern=r"^(debug|info|warning|error)$")
    """debug, info, warning or error."""

    @model_validator(mode="after")
    def _no_user_in_url(self) -> Self:
        for name, value in self:
            if isinstance(value, str) and _USER_IN_URL.search(value):
                raise ValueError(f"{name.upper()} has a user or password in its URL, which others can read; remove it")
        return self

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Return the settings of the environment and of ``overrides``: command-line flags, None if not given.

        Raises:
            ConfigurationError: a value is not allowed, or a variable is a removed one. The message has the name, the
                value and the allowed values, or what does the variable's work now.
        """
        if sentences := removed_among(name for name, value in os.environ.items() if value):
            raise ConfigurationError("; ".join(sentences))
        try:
            return cls(**{name: value for name, value in overrides.items() if value is not None})
        except ValidationError as error:
            raise ConfigurationError(_described(error)) from error

    @classmethod
    def choices(cls) -> dict[str, list[str]]:
        """Return the choices with which a field is read, by the field's name; fields that are always read have none."""
        choices: dict[str, list[str]] = {}
        for section in cls.__mro__:
            if issubclass(section, Settings) and (read_with := vars(section).get("read_with")):
                for name in section.model_fields.keys() - Settings.model_fields.keys():
                    choices.setdefault(name, []).extend(read_with.split(" and "))
        return choices

    @classmethod
    def unread(cls, value: Callable[[str], Any]) -> dict[str, str]:
        """Return the names of the fields that are not read, each with a choice without which it is not.

        Args:
            value: returns the value of a field by its name.
        """
        missing = {name: [c for c in choices if not _is_made(c, value)] for name, choices in cls.choices().items()}
        return {name: choices[0] for name, choices in missing.items() if choices}

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.shared_dir / "runs" / self.run_id

    @property
    def policy_dir(self) -> Path:
        """The directory of published policy versions, each a directory that is renamed into place."""
        return self.run_dir / "policy"

    @property
    def own_functions(self) -> dict[str, str]:
        """The values that name the user's functions or classes, by variable."""
        return {}

    @property
    def token(self) -> str | None:
        """The shared token in plain text, or None."""
        return self.jobgroup_token.get_secret_value() if self.jobgroup_token else None


class SourcesSettings(Settings):
    """The sources of a run, which data-server, reward-server, trainer, collectors and evaluation read."""

    sources: Path | None = None
    """A YAML file with the sources of a run of many tasks, each with a dataset, a ratio and settings of its own;
    docs/guides/agents.md. Unset: DATASET is the only source."""

    _by_source: dict[str, Self] = PrivateAttr(default_factory=dict)
    _sources: list[Source] = PrivateAttr(default_factory=lambda: [MAIN])

    @model_validator(mode="after")
    def _read_sources(self) -> Self:
        if self.sources is not None:
            self._sources = load_sources(self.sources)
            self._by_source = {source.name: self._of(source) for source in self._sources}
        return self

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        each = [own.unread(partial(getattr, own)) for own in self.by_source().values()]
        for name in sorted(self.model_fields_set):
            if all(name in unread for unread in each):
                choice = each[0][name].replace("|", " or ")
                raise ValueError(f"{name.upper()} is read with {choice} alone; set that, or unset {name.upper()}")
        return self

    def by_source(self) -> dict[str, Self]:
        """Return the settings of each source by its name: those that a run of this source alone would have.

        They are the run's settings, replaced by the source's own. Without SOURCES the only one is MAIN. The file was
        read when the settings were loaded, which raises ConfigurationError for a value that is not allowed.
        """
        return self._by_source or {MAIN.name: self}

    def of_sources(self, function: Callable[[Self, Source], Result]) -> dict[str, Result]:
        """Return, by the name of each source, what ``function`` returns for its settings and the source itself.

        Without SOURCES the only one is MAIN.

        Raises:
            ConfigurationError: ``function`` raised it; the message has the file and the source's name.
        """
        results = {}
        for source, settings in zip(self._sources, self.by_source().values(), strict=True):
            try:
                results[source.name] = function(settings, source)
            except ConfigurationError as error:
                if source is MAIN:
                    raise
                raise ConfigurationError(f"SOURCES {self.sources}, source {source.name!r}: {error}") from error
        return results

    @property
    def schedule(self) -> Schedule:
        """The source of every group that is trained on, by the group's place in the run."""
        return Schedule({source.name: source.ratio for source in self._sources if not source.eval_only})

    def without_sources(self, **own: Any) -> Self:
        """Return the run's settings, replaced by ``own``, as those of a run without SOURCES.

        What nothing has set stays unset, as does what ``own`` has as an empty text. What the choices of ``own`` do not
        read is not inherited, nor what describes another dataset.
        """
        left = {"sources", *self.unread(lambda name: own.get(name, getattr(self, name)))}
        if "dataset" in own:
            left |= {"dataset_config", "dataset_test"}
        inherited = {name: getattr(self, name) for name in {*self.model_fields_set, "run_id"} - left - own.keys()}
        given = {name: value for name, value in own.items() if value != ""}
        return type(self)(_env_prefix="no variable has this prefix ", **inherited, **given)

    def _of(self, source: Source) -> Self:
        own = {name: value for name, value in source.settings.items() if name in type(self).model_fields}
        try:
            return self.without_sources(**own)
        except ValidationError as error:
            sentence = f"SOURCES {self.sources}, source {source.name!r}: {_described(error)}"
            raise ConfigurationError(sentence) from error


class ModelSettings(Settings):
    """The model of a run, which trainer, engines, gateway and evaluation read."""

    model_name: str = Field("Qwen/Qwen2.5-0.5B-Instruct", min_length=1)
    """The model: a Hugging Face name or a directory. It is policy version 0, and its tokenizer and chat template make
    the prompts."""


class TemplateSettings(Settings):
    """The form of conversations, which data-server, gateway and evaluation read."""

    chat_template_args: JsonObject = Field(default_factory=dict)
    """Arguments of the chat template as a JSON object, such as `{"enable_thinking": false}`; those of an agent's
    request win."""


class Method(StrEnum):
    """The ways in which a run learns."""

    RL = "rl"
    SFT = "sft"


class MethodSettings(Settings):
    """The way in which a run learns, for trainer and data-server."""

    method: Method = Method.RL
    """`rl`: the policy samples answers and learns from their rewards, or from a teacher. `sft`: it learns the tokens of
    rows with `messages`, or with `prompt` and `completion`, as they are; docs/guides/objectives.md."""


class RewardWeightSettings(Settings):
    """The use of rewards in training, which trainer and data-server read."""

    read_with = "METHOD=rl"

    reward_weight: float = Field(1.0, ge=0)
    """Weight of the policy loss, whose advantages come from rewards. 0, with a teacher: pure distillation. REWARD_FN is
    not asked about training answers. Rows without an answer and groups of one completion are taken."""


class RewardFunctionSettings(Settings):
    """The reward of a run, which reward-server and data-server read."""

    reward_fn: str = "math"
    """The parts of the reward with their weights, such as `math=1,format=0.2,my_rewards:brevity=0.5`. Built in are
    `math` (the last answer equals the ground truth), `exact_match` (the whole text does), `format` (an answer follows
    `####` or is in a box), `reasoning_gym` (the question's generator scores the answer), `reward_model`, `code`
    (docs/guides/code.md), and the judges `judge` and `judge_group`; `module:function` is a function of your own, called
    with the keyword arguments of its signature (docs/guides/data.md)."""
    judge_rubric: Path | None = None
    """A YAML file with the criteria of `judge` and, if you like, of `judge_group`;
    docs/guides/judge.md has its form."""


class MemorySettings(Settings):
    """The use of freed memory, which trainer and embedded engine read."""

    keep_memory: KeepMemory = "auto"
    """Keep freed memory instead of giving it back to the system for others on the machine. On a CPU steps are a sixth
    shorter. `auto`: while the process has needed at most a sixth of the node's memory."""


class ContextSettings(Settings):
    """The context of the engines, which rollout-server and gateway read."""

    engine_context_length: int | None = Field(None, ge=16)
    """Longest prompt and completion together, in tokens; default the model's."""


class DeadlineSettings(Settings):
    """The time-out from which those of the services follow, which trainer and services read."""

    service_deadline_seconds: float = Field(300, gt=0)
    """Longest time that a service may be unreachable before the run ends as recoverable. Other time-outs are parts of
    it: 0.4 for an answer of a judge, a fifteenth for an answer's wait for a worker or box, a fifth for a worker with an
    old version without the trainer, twice for a rollout node without its router or volume. [advanced]"""


class DeterminismSettings(Settings):
    """The determinism of engines, which all who send requests to engines read."""

    engine_deterministic: bool = False
    """The same request with the same seed gives the same tokens and logprobs whatever else SGLang computes at the same
    time; slower. The trainer then requests completions one by one, each with its own seed. The embedded engine is
    always deterministic."""


class EnginesSection(DeterminismSettings, DeadlineSettings):
    """Settings on which trainer and engines must agree: trainer and rollout-server read the same variables."""

    engine_start_seconds: float = Field(1800.0, gt=0)
    """An engine that does not answer that long after its start is killed and restarted. At its start the trainer waits
    for services and workers for SERVICE_DEADLINE_SECONDS more than this. [advanced]"""
    colocate: bool = False
    """Engines run on the trainer's nodes and GPUs, where `python -m trainer` starts them. Needs a job group without a
    rollout-server and ENGINE_SLEEPS; jobgroups/colocated.yaml has both."""
    engine_sleeps: bool = False
    """Engines that share the trainer's GPU give its memory away while the trainer trains, and take it back with the
    next version (`MODE=sync`); docs/gpus.md has a preset. SGLang keeps a copy of its weights in host memory
    for it. The embedded engine's weights stay on the GPU."""
    lora_rank: int = Field(0, ge=0)
    """Train LoRA adapters of this rank, and publish them unmerged; 0: the whole model. SGLang reserves room for
    adapters of up to this rank."""


class AgentColumns(Settings):
    """The columns of a row that an agent sees, which data-server, trainer and evaluation read."""

    agent_columns: str = ""
    """Columns of the dataset, with commas, that an agent gets as `example.row` and a program as `row` of its JSON, such
    as `repository,difficulty`. The others, such as hidden tests, are for rewards alone."""

    @property
    def visible_columns(self) -> list[str]:
        """The names in AGENT_COLUMNS."""
        return [name.strip() for name in self.agent_columns.split(",") if name.strip()]


class AgentFunction(Settings):
    """An agent as a function, the same in training and evaluation."""

    agent: str = ""
    """The agent as `module:function`, the same function in training (`ROLLOUT=agent`) and for `grpo evaluate --agent`.
    `evaluation.multiplying_agent:solve` is an example."""


class AgentProgram(Settings):
    """An agent as a program, the same in training and evaluation."""

    agent_command: str = ""
    """The agent as a shell command in any language (`ROLLOUT=program`, `grpo evaluate --agent-command`): the task is
    JSON on its standard input, and its output is the answer that REWARD_FN scores (docs/guides/agents.md). Or a
    command-line agent that `make harnesses` installs, with the right configuration: `preset:claude-code`,
    `preset:codex`, `preset:mini-swe-agent`, `preset:opencode`."""


class EpisodeLimits(AgentColumns):
    """The limits of an episode, the same in training and evaluation."""

    agent_max_turns: int = Field(16, ge=1, le=65_536)
    """Most calls of the model in an episode."""
    agent_max_tokens: int = Field(4096, ge=1, le=1_048_576)
    """Most tokens that the model samples in an episode."""
    agent_seconds: float = Field(600, gt=0)
    """Longest time of an episode without the time that its calls of the model take. With them it may take twice as
    long; then the engines are too slow, and it has no reward."""


class AgentSettings(AgentFunction, AgentProgram, EpisodeLimits):
    """An agent and its limits, which evaluations read."""


class AnswerSettings(Settings):
    """The sampling of answers, the same in training and evaluation."""

    max_new_tokens: int = Field(512, ge=1)
    """Longest completion, in tokens; an agent's, a turn."""
    temperature: float = Field(1.0, gt=0, le=10)
    """Sampling temperature; training uses the same distribution, and a greedy answer has none."""


def _is_made(choice: str, value: Callable[[str], Any]) -> bool:
    """Return whether a choice of ``read_with`` is made."""
    names, _, allowed = choice.partition("=")
    if allowed:
        return str(value(names.lower())) in allowed.split("|")
    return any(value(name.lower()) for name in names.split("|"))


def _described(error: ValidationError) -> str:
    """Return what is wrong; a default that follows from a wrong setting is not."""
    return "; ".join(_describe(e) for e in error.errors() if e["type"] != "default_factory_not_called")


def _describe(problem: Any) -> str:
    name, message = "_".join(str(part) for part in problem["loc"]).upper(), problem["msg"].removeprefix("Value error, ")
    if not name:  # a check of several settings, which names them itself
        return str(message)
    value = problem.get("input")
    is_secret = "TOKEN" in name or "KEY" in name or _USER_IN_URL.search(str(value))
    value_text = "" if value is None or isinstance(value, dict) or is_secret else f" is {value!r}"
    return f"{name}{value_text}: {message}"
