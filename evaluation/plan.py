"""The plan of an evaluation: the command line and the settings, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation import checkpoints
from evaluation.checkpoints import Checkpoint
from evaluation.node import Allocation, require_vllm
from evaluation.server import NEUTRAL
from evaluation.settings import Api, Backend, EvaluationSettings, SchedulerName, WorkflowName
from services.agents import Agent, load_agent
from services.core import machine
from services.core.errors import ConfigurationError
from services.core.settings import Settings
from services.core.sources import MAIN, Source
from services.data_server.dataset import load as load_dataset
from services.data_server.settings import DataSettings
from services.gateway.settings import GatewaySettings
from services.programs import Program
from services.protocol.prompts import Prompt, Split
from services.reward_server.settings import RewardSettings

ALL = "all"
VOLUME = "/shared/"
"""Where a cluster's nodes mount the volume."""
_NOT_IN_RECIPE = {*Settings.model_fields, "model_name", "sources"}


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


def load_examples(split: str, model: str | None, limit: int, chosen: Collection[str] = ("",)) -> dict[str, Examples]:
    """Load the first ``limit`` prompts (0: all) of a split, ``train``, ``test`` or ``all``, of the ``chosen`` sources.

    Without a ``model`` they have messages, and no token ids.

    Raises:
        ConfigurationError: a dataset or the tokenizer of ``model`` cannot be loaded.
    """
    settings = DataSettings.load(model_name=model)
    loaded = settings.of_sources(
        lambda own, source: _load(own, source, split, limit) if source.name in chosen else None
    )
    return {source: examples for source, examples in loaded.items() if examples is not None}


def _load(settings: DataSettings, source: Source, split: str, limit: int) -> Examples:
    # As in a data-server's own process, transformers is imported without torch, which saves seconds.
    catalogues = load_dataset(settings, source, own_process=True).catalogues
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
            prompts.append(Prompt.model_validate(record | catalogue.row(place)))
    recipe = settings.model_dump(mode="json", exclude=_NOT_IN_RECIPE, exclude_none=True)
    available = sum(len(catalogues[one]) for one in chosen)
    return Examples(prompts, available, too_long, {**recipe, "split": split})


@dataclass(frozen=True)
class ServerOptions:
    """Which servers to use: running ones, or how to start them."""

    scheduler: SchedulerName | None = None
    backend: Backend = Backend.ROLLOUT
    allocation: Allocation = field(default_factory=Allocation)
    urls: Sequence[str] = ()
    discover: str | None = None
    endpoints: Sequence[str] = ()
    """Servers of any make that speak OpenAI's API."""
    api: Api | None = None
    """Their route; None: chat for --endpoint, completions of token ids for a vLLM that this command starts."""
    api_key_env: str = ""
    """The variable with their key."""
    reward_url: str | None = None
    is_dry_run: bool = False

    @property
    def is_foreign(self) -> bool:
        """Return whether the servers are not rollout nodes, but speak OpenAI's API."""
        return bool(self.endpoints) or self.backend is Backend.VLLM

    @property
    def openai_api(self) -> Api:
        """The route by which foreign servers answer prompts."""
        return self.api or (Api.CHAT if self.endpoints else Api.COMPLETIONS)

    def resolved(self) -> SchedulerName:
        """Return what starts the servers.

        Raises:
            ConfigurationError: options contradict each other.
        """
        running = [name for name, value in (("--url", self.urls), ("--discover", self.discover)) if value]
        if self.endpoints and running:
            raise ConfigurationError(f"--endpoint and {running[0]} are both given; give the servers of one kind")
        running += ["--endpoint"] if self.endpoints else []
        scheduler = self.scheduler or (SchedulerName.ENDPOINTS if running else SchedulerName.LOCAL)
        if running and scheduler is not SchedulerName.ENDPOINTS:
            raise ConfigurationError(f"--scheduler {scheduler.value} starts its own servers; leave out {running[0]}")
        for option, value in (("--api", self.api), ("--api-key-env", self.api_key_env)):
            if value and not self.endpoints:
                raise ConfigurationError(f"{option} is for --endpoint; leave it out")
        if self.reward_url and scheduler is SchedulerName.SKYPILOT:
            raise ConfigurationError("--scheduler skypilot starts its own reward-server; leave out --reward-url")
        if scheduler is SchedulerName.ENDPOINTS and self.allocation != Allocation():
            raise ConfigurationError(
                "--num-servers and --allocation are for servers that this command starts; leave them out"
            )
        if self.backend is Backend.VLLM:
            if scheduler is not SchedulerName.LOCAL:
                raise ConfigurationError("--backend vllm starts servers on this machine; give --scheduler local")
            require_vllm()
        if self.is_dry_run and scheduler is not SchedulerName.SLURM:
            raise ConfigurationError("--dry-run shows the batch file of --scheduler slurm; leave it out")
        if scheduler in (SchedulerName.SKYPILOT, SchedulerName.SLURM, SchedulerName.RAY):
            self.allocation.check_cluster()
        elif scheduler is SchedulerName.LOCAL:
            self.allocation.check_machine(len(machine.visible_gpus()))
        return scheduler

    def key(self) -> str | None:
        """Return the key for foreign servers.

        Raises:
            ConfigurationError: the variable of the key is not set.
        """
        if not self.api_key_env:
            return None
        if not os.environ.get(self.api_key_env):
            raise ConfigurationError(f"--api-key-env {self.api_key_env}: this variable is not set; put the key into it")
        return os.environ[self.api_key_env]


class Plan:
    """The checkpoints to evaluate, the settings, the servers, and the directory of the results."""

    def __init__(
        self,
        settings: EvaluationSettings,
        *,
        models: Sequence[str],
        run_dir: Path | None,
        servers: ServerOptions,
        output: Path | None,
        variables: Mapping[str, str],
    ) -> None:
        """Make a plan from the options of the command line; ``variables`` are those of --env and --env-file.

        Raises:
            ConfigurationError: options contradict each other, or a model or agent does not exist.
        """
        if not models and run_dir is None:
            models = [settings.model_name]
        self.settings = settings
        self.servers = servers
        self.scheduler = servers.resolved()
        self.key = servers.key()
        self.variables = variables
        self.dataset = str(settings.sources) if settings.sources else DataSettings.load().dataset
        if settings.sources is None:
            _check_plays_no_environment(settings, variables)
        played = settings.of_sources(lambda _, source: source is not MAIN and _is_played(source))
        self.sources = {name: own for name, own in settings.by_source().items() if not played[name]}
        """The settings of each source whose prompts are questions; "" without SOURCES."""
        self.left_out = [name for name in played if played[name]]
        """The sources that are episodes of environments."""
        if not self.sources:
            raise ConfigurationError(
                f"SOURCES {settings.sources} has episodes of environments alone, and this command asks questions; the "
                "run's own evaluations play them: see accuracy in its metrics.jsonl"
            )
        _check_ks(settings)
        is_on_cluster = self.scheduler is SchedulerName.SKYPILOT
        self.checkpoints = _checkpoints(models, run_dir, servers, self.scheduler)
        self.agents = {
            name: _agent_of(own, servers, is_on_cluster=is_on_cluster) if own.workflow is WorkflowName.AGENT else None
            for name, own in self.sources.items()
        }
        self.output = (output or settings.eval_output / self._name(run_dir)).resolve()

    def _name(self, run_dir: Path | None) -> str:
        """Return the name of the results' directory, for those who give none."""
        of_several = run_dir.resolve().name if run_dir else f"{len(self.checkpoints)}-models"
        name = self.checkpoints[0].long_name if len(self.checkpoints) == 1 else of_several
        is_agent = self.settings.workflow is WorkflowName.AGENT
        return "-".join([name, Path(self.dataset).stem, self.settings.eval_split, *(["agent"] if is_agent else [])])

    def directory(self, checkpoint: Checkpoint) -> Path:
        """Return the directory of a model's samples and results."""
        return self.output if len(self.checkpoints) == 1 else self.output / checkpoint.name

    def identity(self, checkpoint: Checkpoint, examples: Mapping[str, Examples]) -> dict[str, Any]:
        """Return everything that a sample depends on; the numbers of prompts and of samples may change."""
        rewards = RewardSettings.load().by_source()
        own = {name: self._identity(self.sources[name], of, rewards[name]) for name, of in examples.items()}
        return {"weights": checkpoint.fingerprint(), **own.get("", {"sources": own})}

    def _identity(self, settings: EvaluationSettings, examples: Examples, rewards: RewardSettings) -> dict[str, Any]:
        """Return everything but the model that a sample of a source depends on."""
        names = {"max_new_tokens", "temperature", "top_p", "seed"}
        is_agent = settings.workflow is WorkflowName.AGENT
        if is_agent:
            names |= {"agent_max_turns", "agent_max_tokens", "agent_seconds"}
        sampling = settings.model_dump(mode="json", include=names)
        return {
            **sampling,
            "eval_workflow": settings.workflow.value,
            # Samples of agents that were not played through a gateway have other seeds.
            **({"forced_tool_calls": GatewaySettings.load().forced_tool_calls} if is_agent else {}),
            **({"api": self.servers.openai_api.value, "neutral": NEUTRAL} if self.servers.is_foreign else {}),
            **({"eval_stop": settings.eval_stop} if settings.eval_stop else {}),
            **({"agent": settings.agent} if settings.agent else {}),
            **({"agent_command": settings.agent_command} if settings.agent_command else {}),
            **({"eval_session_questions": questions} if (questions := settings.eval_session_questions) > 1 else {}),
            **examples.recipe,
            # A reward-server elsewhere has its own reward functions.
            **({"reward_fn": rewards.reward_fn} if self.servers.reward_url is None else {}),
            **({"accuracy_fn": rewards.accuracy_fn} if rewards.accuracy_fn is not None else {}),
        }


def _is_played(source: Source) -> bool:
    """Return whether the prompts of a source are episodes of an environment."""
    return source.settings.get("rollout", os.environ.get("ROLLOUT", "")) == "environment"


def _check_plays_no_environment(settings: EvaluationSettings, variables: Mapping[str, str]) -> None:
    """Check that the variables are not those of a run on an environment, unless they name questions or an agent."""
    environment = variables.get("ENVIRONMENT", "")
    is_run = environment or variables.get("ROLLOUT") == "environment"
    if not is_run or variables.get("DATASET", "seeds") != "seeds" or settings.workflow is WorkflowName.AGENT:
        return
    raise ConfigurationError(
        f"{f'ENVIRONMENT is {environment!r}' if environment else 'ROLLOUT is environment'}, and this command asks "
        "questions, and plays no episodes of environments. The run's own evaluations do, with EVAL_PROMPTS held-out "
        "seeds: see accuracy and eval_reward in its metrics.jsonl. To play a model afterwards, serve it by "
        "services.rollout_server and play it by grpo trajectories (docs/guides/environment.md). For "
        "questions give --dataset"
    )


def _agent_of(settings: EvaluationSettings, servers: ServerOptions, *, is_on_cluster: bool) -> Agent | None:
    """Return the agent; None where the whole evaluation runs elsewhere.

    Raises:
        ConfigurationError: the agent does not exist, or the servers cannot stand behind a gateway.
    """
    if servers.is_foreign:
        kind = "--endpoint" if servers.endpoints else "--backend vllm"
        raise ConfigurationError(
            f"{kind} serves texts, but an agent is evaluated as it is trained, through the gateway, which needs "
            "servers that take and return token ids by /generate. Give --url of a rollout node, a router or an SGLang "
            "server, or let this command start one; --workflow single-turn evaluates without the agent"
        )
    if is_on_cluster:
        return None
    return Program(settings.agent_command) if settings.agent_command else load_agent("AGENT", settings.agent)


def _checkpoints(
    models: Sequence[str], run_dir: Path | None, servers: ServerOptions, scheduler: SchedulerName
) -> list[Checkpoint]:
    """Return the checkpoints to evaluate.

    Raises:
        ConfigurationError: one does not exist, or running servers cannot serve them.
    """
    if servers.endpoints:
        found = _named(models, run_dir)
    elif scheduler is SchedulerName.SKYPILOT:
        found = _on_cluster(models, run_dir)
    else:
        found = checkpoints.resolve(models, run_dir)
    if scheduler is SchedulerName.ENDPOINTS and len(found) > 1:
        raise ConfigurationError(
            f"running servers have one model, but {len(found)} are given; give one, or --scheduler local"
        )
    return found


def _on_cluster(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    """Return checkpoints for a cluster: directories of its volume, names on the hub, and directories of this machine.

    Raises:
        ConfigurationError: a directory of this machine is not a model.
    """
    on_volume = [Checkpoint(checkpoints.file_name(model), model) for model in models if model.startswith(VOLUME)]
    others = [model for model in models if not model.startswith(VOLUME)]
    return on_volume + (checkpoints.resolve(others, run_dir) if others or run_dir else [])


def _named(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    """Return models by the names that foreign servers have for them."""
    if run_dir is not None:
        raise ConfigurationError("--endpoint and a run are both given; --model names the model of an endpoint")
    return [Checkpoint(checkpoints.file_name(model), model) for model in models]


def _check_ks(settings: EvaluationSettings) -> None:
    too_large = [k for k in settings.ks if k > settings.eval_samples]
    if too_large:
        raise ConfigurationError(
            f"--k {too_large[0]} needs as many samples of each prompt, but --samples is {settings.eval_samples}; give "
            f"--samples {too_large[-1]} or more, or a smaller k"
        )
