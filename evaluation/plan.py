"""The plan of an evaluation: the command line and the settings, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation import checkpoints
from evaluation.checkpoints import Checkpoint
from evaluation.examples import Examples
from evaluation.settings import EvaluationSettings, SchedulerName, WorkflowName
from services.agents import Agent, load_agent
from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings
from services.programs import Program
from services.reward_server.settings import RewardSettings

VOLUME = "/shared/"


class Plan:
    """The checkpoints to evaluate, with which settings and servers, and the directory of the results."""

    def __init__(
        self,
        settings: EvaluationSettings,
        *,
        models: Sequence[str],
        run_dir: Path | None,
        scheduler: SchedulerName | None,
        num_servers: int,
        urls: Sequence[str],
        discover: str | None,
        reward_url: str | None,
        output: Path | None,
        variables: Mapping[str, str],
    ) -> None:
        """Make a plan from the options of the command line; ``variables`` are those of --env and --env-file.

        Raises:
            ConfigurationError: options contradict each other, or a model or agent does not exist.
        """
        if not models and run_dir is None:
            models = [settings.model_name]
        has_servers = bool(urls or discover)
        self.settings = settings
        self.scheduler = scheduler or (SchedulerName.ENDPOINTS if has_servers else SchedulerName.LOCAL)
        self.num_servers = num_servers
        self.urls = urls
        self.discover = discover
        self.reward_url = reward_url
        self.variables = variables
        self.dataset = DataSettings.load().dataset
        _check(settings, self.scheduler, has_servers=has_servers)
        is_on_cluster = self.scheduler is SchedulerName.SKYPILOT
        found = _on_cluster(models, run_dir) if is_on_cluster else checkpoints.resolve(models, run_dir)
        if self.scheduler is SchedulerName.ENDPOINTS and len(found) > 1:
            raise ConfigurationError(
                f"running servers have one model, but {len(found)} are given; give one, or --scheduler local"
            )
        self.checkpoints = found
        is_agent = settings.workflow is WorkflowName.AGENT
        self.agent = _agent_of(settings) if is_agent and not is_on_cluster else None
        name = found[0].name if len(found) == 1 else (run_dir.resolve().name if run_dir else f"{len(found)}-models")
        parts = [name, Path(self.dataset).stem, settings.eval_split, *(["agent"] if is_agent else [])]
        self.output = (output or settings.eval_output / "-".join(parts)).resolve()

    def directory(self, checkpoint: Checkpoint) -> Path:
        """Return the directory of a model's samples and results."""
        return self.output if len(self.checkpoints) == 1 else self.output / checkpoint.name

    def identity(self, checkpoint: Checkpoint, examples: Examples) -> dict[str, Any]:
        """Return everything that a sample depends on; the numbers of prompts and of samples may change."""
        settings = self.settings
        sampling = settings.model_dump(mode="json", include={"max_new_tokens", "temperature", "top_p", "seed"})
        return {
            "weights": checkpoint.fingerprint(),
            **sampling,
            "eval_workflow": settings.workflow.value,
            **({"eval_agent": settings.eval_agent} if settings.eval_agent else {}),
            **({"eval_agent_command": settings.eval_agent_command} if settings.eval_agent_command else {}),
            **examples.recipe,
            # A reward-server elsewhere has its own reward functions.
            **({"reward_fn": RewardSettings.load().reward_fn} if self.reward_url is None else {}),
        }


def _agent_of(settings: EvaluationSettings) -> Agent:
    if settings.eval_agent_command:
        return Program(settings.eval_agent_command)
    return load_agent("--agent", settings.eval_agent)


def _on_cluster(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    """Return checkpoints that the cluster has: names on the hub, and directories of the volume."""
    here = [model for model in models if Path(model).is_dir() and not model.startswith(VOLUME)]
    if here or run_dir is not None:
        raise ConfigurationError(
            f"--scheduler skypilot: {here[0] if here else run_dir} is a directory of this machine; give a model's name "
            f"on the hub, or a directory of the volume such as {VOLUME}runs/grpo-17/model"
        )
    return [Checkpoint(checkpoints.file_name(model), model) for model in models]


def _check(settings: EvaluationSettings, scheduler: SchedulerName, *, has_servers: bool) -> None:
    too_large = [k for k in settings.ks if k > settings.eval_samples]
    if too_large:
        raise ConfigurationError(
            f"--k {too_large[0]} needs as many samples of each prompt, but --samples is {settings.eval_samples}; give "
            f"--samples {too_large[-1]} or more, or a smaller k"
        )
    if has_servers and scheduler is not SchedulerName.ENDPOINTS:
        raise ConfigurationError(
            f"--scheduler {scheduler.value} starts its own servers; leave out --url and --discover"
        )
