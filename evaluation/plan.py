"""The plan of an evaluation: the command line and the settings, checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from evaluation.openai_engine import NEUTRAL
from evaluation.settings import EvaluationSettings
from services.agents import Agent, load_agent
from services.core import endpoints, machine
from services.core.errors import ConfigurationError
from services.core.models import context_length
from services.core.settings import Settings
from services.core.sources import MAIN, Source
from services.data_server.dataset import load as load_dataset
from services.data_server.settings import HARBOR, DataSettings, generator_of
from services.environment_server.settings import EnvironmentSettings
from services.gateway.settings import GatewaySettings
from services.harnesses import check_context, harness_of, program_of
from services.protocol.prompts import Prompt, Split
from services.reward_server.settings import RewardSettings
from services.weights.policy_store import PolicyStore, is_adapter

ALL = "all"
VOLUME = "/shared/"
"""Where a cluster's nodes mount the volume."""
_NOT_IN_RECIPE = {*Settings.model_fields, "model_name", "sources"}
_NOT_IN_SAMPLES = {*_NOT_IN_RECIPE, "eval_output", "eval_prompts", "eval_samples", "eval_k", "eval_concurrency"}
"""The settings on which no sample depends."""
CONFIG = "config.json"
_STEP = re.compile(r"(?:v|step[-_]?|checkpoint[-_]|global_step[-_]?)0*(\d+)")
_EDGE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 12
_PIECE_APART = 1 << 18
"""Bytes from piece to piece of a file, less than a matrix has."""


class Scheduler(StrEnum):
    """The program that starts the servers."""

    LOCAL = "local"
    SKYPILOT = "skypilot"
    SLURM = "slurm"
    RAY = "ray"


class Backend(StrEnum):
    """The program that serves a model where servers are started on this machine."""

    ROLLOUT = "rollout"
    """A rollout node: SGLang, or the embedded engine without GPUs."""
    VLLM = "vllm"


@dataclass(frozen=True)
class Checkpoint:
    """A model, its name in reports, and its training step."""

    name: str
    model: str
    step: int | None = None

    @property
    def is_here(self) -> bool:
        """Return whether the model is a directory of this machine."""
        return Path(self.model).is_dir()

    @property
    def long_name(self) -> str:
        """The name with the directories above it where every run has one of that name, such as runs/X/model."""
        path = Path(self.model)
        is_common = path.is_absolute() and (path.name == "model" or _STEP.fullmatch(path.name))
        return _name(self.model, parts=3) if is_common else self.name

    def fingerprint(self) -> str:
        """Return a digest of the weights: the same for a copy, another once the weights have changed.

        A model of the hub has its name as fingerprint.
        """
        directory = Path(self.model)
        if not self.is_here:
            return self.model
        digest = hashlib.sha256()
        for path in sorted([directory / CONFIG, *directory.glob("*.safetensors"), *directory.glob("*.bin")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                # Training may change some tensors alone, such as adapters that are merged.
                for start in range(0, size, _PIECE_APART):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
        return digest.hexdigest()[:16]


def resolve(model: str | None, run_dir: Path | None) -> Checkpoint:
    """Return the checkpoint that a command names: a model, or else a run's last one.

    Raises:
        ConfigurationError: a directory is not a whole model, or a run has none.
    """
    if model is not None:
        return _checkpoint(model)
    assert run_dir is not None, "a command names a model or a run"
    return _of_run(run_dir.resolve())


def file_name(text: str) -> str:
    """Return ``text`` with every character that is unusual in file names replaced by a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser().resolve()
    if not path.is_dir():
        return Checkpoint(_name(model), model)
    if is_adapter(path):
        raise _adapter_refusal("--model", path)
    if not (path / CONFIG).is_file():
        raise ConfigurationError(f"--model {model!r} has no {CONFIG}; a run is given without --model")
    return Checkpoint(_name(str(path)), str(path), _step(path))


def _adapter_refusal(option: str, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{option}: {path} has LoRA adapters only; merge them by `grpo merge-adapter {path} DIR` and give --model DIR"
    )


def _of_run(run_dir: Path) -> Checkpoint:
    model = run_dir / "model"
    if (model / CONFIG).is_file():
        return Checkpoint("model", str(model), _step(model))
    published = PolicyStore(run_dir / "policy").published()
    if not published:
        raise ConfigurationError(f"{str(run_dir)!r} has neither policy/v* nor model/; give a run's directory")
    last = published[-1]
    if is_adapter(last.path):
        raise _adapter_refusal("run", last.path)
    return Checkpoint(last.path.name, str(last.path), last.version)


def _step(path: Path) -> int | None:
    """Return the step in the name of an absolute path, or for a run's final model the run's number of steps."""
    if match := _STEP.fullmatch(path.name):
        return int(match[1])
    summary = path.parent / "summary.json"
    if path.name == "model" and summary.is_file():
        steps = json.loads(summary.read_text("utf-8")).get("steps")
        return steps if isinstance(steps, int) else None
    return None


def _name(model: str, parts: int = 1) -> str:
    return file_name("-".join(Path(model).parts[-parts:]))


@dataclass(frozen=True)
class Examples:
    """The prompts of a split, in the order of the source."""

    prompts: list[Prompt]
    available: int
    """Rows of the split; ``prompts`` are the first of them."""
    too_long: int
    """Further prompts, which have more than MAX_PROMPT_TOKENS tokens."""
    recipe: dict[str, Any]
    """The settings that the prompts depend on: other prompts make another evaluation."""


@dataclass(frozen=True)
class ServerOptions:
    """The servers to use: running ones, or how to start them."""

    scheduler: Scheduler | None = None
    backend: Backend = Backend.ROLLOUT
    num_servers: int | None = None
    url: str | None = None
    """A running router or engine."""
    endpoint: str | None = None
    """A server of any make that speaks OpenAI's API, which gets conversations; all others get token ids."""
    api_key_env: str | None = None
    """The variable with its key."""
    reward_url: str | None = None

    @property
    def is_foreign(self) -> bool:
        """Return whether the server is no rollout node, but speaks OpenAI's API."""
        return self.endpoint is not None or self.backend is Backend.VLLM

    @property
    def starts(self) -> Scheduler | None:
        """The program that starts the servers; None where they run already."""
        runs = self.url or self.endpoint or (in_job_group() and self.scheduler is None)
        return None if runs else self.scheduler or Scheduler.LOCAL

    @property
    def key(self) -> str | None:
        """The key for a foreign server."""
        return os.environ.get(self.api_key_env) if self.api_key_env else None

    def check(self, gpus_each: int) -> None:
        """Check that the options fit together; an engine has ``gpus_each`` GPUs.

        Raises:
            ConfigurationError: they do not.
        """
        servers, gpus, starts = self.num_servers or 1, len(machine.visible_gpus()), self.starts
        is_vllm, wanted = self.backend is Backend.VLLM, servers * gpus_each
        is_machine_small = wanted > (gpus or servers)
        refused = {
            "--url and --endpoint are both given": self.url and self.endpoint,
            "--scheduler starts its own servers": self.scheduler and (self.url or self.endpoint),
            "--num-servers is for servers that this command starts": self.num_servers and starts is None,
            "--api-key-env is for --endpoint": self.api_key_env and not self.endpoint,
            f"--api-key-env {self.api_key_env}: this variable is not set": self.api_key_env and not self.key,
            "--backend vllm starts servers on this machine": is_vllm and starts is not Scheduler.LOCAL,
            "--scheduler skypilot starts its own reward-server": self.reward_url and starts is Scheduler.SKYPILOT,
            f"{servers} servers need {wanted} GPUs, and there are {gpus}": is_machine_small
            and starts is Scheduler.LOCAL,
        }
        for problem, is_so in refused.items():
            if is_so:
                raise ConfigurationError(f"{problem}; leave out an option, or correct it")


def in_job_group() -> bool:
    """Return whether this process is a node of a job group, on a cluster or under the local runner."""
    return "SKYPILOT_JOBGROUP_NAME" in os.environ or endpoints.ENDPOINTS_VARIABLE in os.environ


class Plan:
    """The checkpoint to evaluate, the settings, the servers, and the directory of the results."""

    def __init__(
        self,
        settings: EvaluationSettings,
        *,
        model: str | None = None,
        run_dir: Path | None = None,
        servers: ServerOptions | None = None,
        output: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Make a plan from the options of the command line; ``variables`` are those of --env and --env-file.

        The model is the one given, else the last one of the run in ``run_dir``, else MODEL_NAME.

        Raises:
            ConfigurationError: options contradict each other, or a model or agent does not exist.
        """
        self.settings = settings
        self.servers = servers or ServerOptions()
        self.variables = variables or {}
        self.gpus_each = int({**os.environ, **self.variables}.get("SGLANG_TP_SIZE", 1))
        """The GPUs of an engine."""
        self.servers.check(self.gpus_each)
        self.dataset = str(settings.sources) if settings.sources else DataSettings.load().dataset
        self.sources, self.left_out = _asked(settings, self.variables)
        if model and run_dir:
            raise ConfigurationError(f"a run, {run_dir}, and --model {model} are both given; leave one out")
        self.checkpoint = self._checkpoint(model or (None if run_dir else settings.model_name), run_dir)
        data = DataSettings.load().by_source()
        self.tasks = {name for name in self.sources if generator_of(data[name].dataset) == HARBOR}
        """The sources of tasks, which AGENT_COMMAND or the model's own programs play in boxes of this machine."""
        self.agents = {name: self._agent_of(own, is_task=name in self.tasks) for name, own in self.sources.items()}
        self.output = (output or settings.eval_output / self._name).resolve()

    def _checkpoint(self, model: str | None, run_dir: Path | None) -> Checkpoint:
        """Return the checkpoint, which need not be a directory of this machine where the servers are elsewhere.

        Raises:
            ConfigurationError: it does not exist.
        """
        is_on_volume = self.servers.starts is Scheduler.SKYPILOT and (model or "").startswith(VOLUME)
        if model and (self.servers.endpoint or is_on_volume):
            return Checkpoint(file_name(model), model)
        return resolve(model, run_dir)

    @property
    def _name(self) -> str:
        """The name of the results' directory, for those who give none."""
        words = [self.checkpoint.long_name, file_name(Path(self.dataset).stem), self.settings.eval_split]
        return "-".join([*words, *(["agent"] if self.settings.has_agent else [])])

    @property
    def needs_gateway(self) -> bool:
        """True if prompts are answered by episodes."""
        return any(self.agents.values()) or bool(self.tasks)

    def _agent_of(self, settings: EvaluationSettings, *, is_task: bool) -> Agent | None:
        """Return the agent of a source; None without one, and where the whole evaluation runs elsewhere.

        Raises:
            ConfigurationError: the agent does not exist, or the servers cannot stand behind a gateway.
        """
        if is_task and settings.agent:
            raise ConfigurationError(
                f"AGENT {settings.agent!r} plays no tasks of harbor:DIR; give AGENT_COMMAND, or no agent by --agent="
            )
        if is_task and self.servers.starts is Scheduler.SKYPILOT:
            raise ConfigurationError("tasks of harbor:DIR need boxes on this machine: leave out --scheduler skypilot")
        if not settings.has_agent and not is_task:
            return None
        if self.servers.is_foreign:
            raise ConfigurationError(
                "agents need token ids; --endpoint and --backend vllm give texts; give --url, or no agent by --agent="
            )
        if self.servers.starts is Scheduler.SKYPILOT:
            return None
        if not settings.agent_command:
            return load_agent("AGENT", settings.agent) if settings.agent else None
        harness, model = harness_of(settings.agent_command), self.checkpoint.model
        if harness is not None and Path(model).is_dir():
            context = GatewaySettings.load().engine_context_length or context_length(model, "MODEL_NAME")
            check_context(harness, settings.max_new_tokens, context)
        return program_of(settings.agent_command, settings.agent_max_turns, settings.max_new_tokens)

    def examples(self) -> dict[str, Examples]:
        """Load the prompts of each source, with the model's token ids where the servers take them.

        Raises:
            ConfigurationError: a dataset or the model's tokenizer cannot be loaded.
        """
        settings = DataSettings.load(model_name=None if self.servers.endpoint else self.checkpoint.model)
        loaded = settings.of_sources(
            lambda own, source: self._load(own, source) if source.name in self.sources else None
        )
        return {source: examples for source, examples in loaded.items() if examples is not None}

    def _load(self, settings: DataSettings, source: Source) -> Examples:
        split, limit = self.settings.eval_split, self.settings.eval_prompts
        # As in a data-server's own process, transformers is imported without torch, which saves seconds.
        catalogues = load_dataset(settings, source, own_process=True).catalogues
        chosen = [catalogues[one] for one in (Split if split == ALL else [Split(split)])]
        prompts: list[Prompt] = []
        too_long = 0
        for catalogue, place in ((one, place) for one in chosen for place in range(len(one))):
            if limit and len(prompts) >= limit:
                break
            record = catalogue.record(place)
            if record is None:
                too_long += 1
            else:
                prompts.append(Prompt.model_validate(record | catalogue.row(place)))
        recipe = settings.model_dump(mode="json", exclude=_NOT_IN_RECIPE, exclude_none=True)
        return Examples(prompts, sum(map(len, chosen)), too_long, {**recipe, "split": split})

    def identity(self, examples: Mapping[str, Examples]) -> dict[str, Any]:
        """Return everything that a sample depends on; the numbers of prompts and of samples may change."""
        rewards = RewardSettings.load().by_source()
        own = {name: self._identity(self.sources[name], of, rewards[name]) for name, of in examples.items()}
        return {"weights": self.checkpoint.fingerprint(), **own.get("", {"sources": own})}

    def _identity(self, settings: EvaluationSettings, examples: Examples, rewards: RewardSettings) -> dict[str, Any]:
        """Return everything but the model that a sample of a source depends on."""
        own = settings.model_dump(mode="json", exclude=_NOT_IN_SAMPLES)
        if settings.has_agent:
            own["forced_tool_calls"] = GatewaySettings.load().forced_tool_calls
        if generator_of(examples.recipe["dataset"]) == HARBOR:
            own["environment_max_steps"] = EnvironmentSettings.load().environment_max_steps
        if self.servers.is_foreign:
            own |= {"api": "chat" if self.servers.endpoint else "completions", "neutral": NEUTRAL}
        # A reward-server elsewhere has its own reward functions.
        own |= {} if self.servers.reward_url else {"reward_fn": rewards.reward_fn}
        return {**own, "accuracy_fn": rewards.accuracy_fn, **examples.recipe}


def _asked(
    settings: EvaluationSettings, variables: Mapping[str, str]
) -> tuple[dict[str, EvaluationSettings], list[str]]:
    """Return the settings of each source whose prompts are questions, and the sources that are left out.

    Without SOURCES the only name is "".

    Raises:
        ConfigurationError: there are episodes of environments alone, which this command does not play.
    """
    rollout = os.environ.get("ROLLOUT")
    # Without SOURCES the variables of a run on an environment may name questions or an agent instead.
    is_run = bool(variables.get("ENVIRONMENT")) or variables.get("ROLLOUT") == "environment"
    is_run &= variables.get("DATASET", "seeds") == "seeds" and not settings.has_agent
    data = DataSettings.load().by_source()

    def is_played(_: EvaluationSettings, source: Source) -> bool:
        if generator_of(data[source.name].dataset) == HARBOR:
            return False
        return is_run if source is MAIN else source.settings.get("rollout", rollout) == "environment"

    played = settings.of_sources(is_played)
    asked = {name: own for name, own in settings.by_source().items() if not played[name]}
    if not asked:
        environment, sources = variables.get("ENVIRONMENT", ""), str(settings.sources)
        raise ConfigurationError(
            f"ENVIRONMENT {environment!r}, ROLLOUT {rollout!r} and SOURCES {sources!r} have no questions to ask; give "
            "--dataset, or serve the model by services.rollout_server and play it by grpo trajectories"
        )
    return asked, [name for name in played if played[name]]
