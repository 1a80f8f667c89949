"""Steps of a run, computed again from their records and a checkpoint, and compared with the run to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from pydantic_settings import PydanticBaseSettingsSource
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.core.errors import ConfigurationError
from services.core.files import read_records, saved_steps
from services.core.settings import Settings
from trainer.algorithm.packing import TrainingGroup
from trainer.checkpoints.checkpoint import damage, load_checkpoint, read_state, tensors_of
from trainer.checkpoints.state import Computation
from trainer.config import TrainerSettings, sections
from trainer.config.objective import Objective
from trainer.model.critic import CriticLearner
from trainer.model.learner import Learner, UpdateResult
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks
from trainer.rank_calls import computation, update_models
from trainer.reporting.group_records import GroupRecords, StepHead

_SECTIONS = (
    *(sections.AlgorithmSection, sections.CriticSection, sections.DistillationSection),
    *(sections.MemorySection, sections.OptimisationSection, sections.SamplingSection),
)
_FIELDS = {name for section in _SECTIONS for name in section.model_fields} - Settings.model_fields.keys()
NUMBERS = {"model_name", "seed", "sources"} | _FIELDS
"""The settings on which the numbers of an update depend."""


@dataclass
class Difference:
    """A number, or a tensor of a checkpoint, that was computed differently."""

    name: str
    recorded: float | None
    recomputed: float | None
    """A tensor's numbers are those at the first place that differs."""
    elements: int | None = None
    """The elements of a tensor that differ, on the first rank with any."""
    largest: float | None = None
    """Their largest distance."""


@dataclass
class Compared:
    """Steps that were computed again, and where they first differ from the run."""

    first: int
    last: int
    begin: str = ""
    """The checkpoint from which they were computed, or the model with which the run began."""
    metrics: int = 0
    """Numbers of metrics.jsonl that were compared."""
    tensors: int | None = None
    """Tensors of the checkpoint after the last step that were compared; None without this checkpoint."""
    step: int | None = None
    """The first step that differs; None if all are equal to the bit."""
    differences: list[Difference] = field(default_factory=list)
    """The differences in that step: its metrics as they are computed, or the tensors of the checkpoint."""
    then: Computation | None = None
    """The machine and software that computed these steps in the run."""
    now: Computation | None = None
    """The machine and software that computed them again."""
    reason: str | None = None
    """Why the steps could not be compared."""

    def note(self, step: int, differences: list[Difference]) -> None:
        """Note what differs in a step, unless an earlier one differs."""
        if differences and self.step is None:
            self.step, self.differences = step, differences


class Recomputation:
    """A run's models and optimizers as they were after a step, which take the steps after it again.

    Every rank makes the same calls.
    """

    def __init__(self, run_dir: Path, compared: Compared, ranks: Ranks) -> None:
        """Load the checkpoint before the steps that are ``compared``, or the model with which the run began.

        Raises:
            ConfigurationError: the checkpoint, the model or the record of the next step cannot be used.
        """
        self.run_dir, self.records = run_dir, GroupRecords(run_dir)
        head, after = self.records.head(compared.first), compared.first - 1
        self.settings, then = _settings(run_dir, head), head.computation
        torch.set_num_threads(then.threads)
        ranks = ranks.replicated(then.replicas).in_contexts(self.settings.context_parallel_size)
        ranks = ranks.laid_out(self.settings.layout)
        self.ranks, self.step = ranks, after
        torch.manual_seed(self.settings.seed)
        policy = load_policy(self.settings, ranks)
        # Without TEACHER_JSD_BETA the recorded groups have what their teachers said.
        has_teachers = self.settings.teacher_jsd_beta is not None
        self.learner = Learner(self.settings, policy, ranks, head.total_steps, has_teachers=has_teachers)
        self.critic = CriticLearner(self.learner) if self.settings.has_critic else None
        baselines: Mapping[str, Mapping[int, float]] = {}
        if after:
            self.load(after)
            baselines = read_state(checkpoint(run_dir, after)).role_baselines
        self.objective = Objective(self.settings, baselines)
        self.compared = compared
        compared.begin = f"checkpoint step-{after:06d}" if after else self.settings.model_name
        compared.then, compared.now = then, computation(policy, ranks)

    def load(self, step: int) -> None:
        """Load the checkpoint of a step."""
        load_checkpoint(checkpoint(self.run_dir, step), self.learner, self.critic)

    def groups(self) -> tuple[StepHead, list[TrainingGroup]]:
        """Return the head of the next step's record, and its groups with the advantages that they had.

        Raises:
            ConfigurationError: the record cannot be used, or the run had resumed with other settings.
        """
        head = self.records.head(self.step + 1)
        now = _settings(self.run_dir, head)
        if differing := sorted(name for name in NUMBERS if getattr(now, name) != getattr(self.settings, name)):
            raise ConfigurationError(
                f"step {head.step} had other settings than the one before ({', '.join(differing).upper()}), and the "
                "checkpoint between them is gone; name a step after the next checkpoint"
            )
        groups = [
            self.objective.training_group(r.group, weight=r.weight, is_replayed=r.is_replayed)
            for r in self.records.groups(head.step)
        ]
        reference = self.learner.reference_logprobs(groups) if self.settings.kl_in_reward else None
        values = None if self.critic is None else self.critic.values(groups)
        return head, self.objective.with_advantages(groups, reference, values)

    def take(self, head: StepHead, groups: list[TrainingGroup]) -> UpdateResult:
        """Take the next step, with what ``groups`` returned for it, and compare its metrics with those of the run."""
        self.learner.total_steps = head.total_steps
        result = update_models(self.learner, self.critic, groups, self.step, head.position, waves=head.waves)
        self.step = head.step
        lines = read_records(self.run_dir / "metrics.jsonl")
        recorded: dict[str, Any] = next((line for line in lines if line["step"] == head.step), {})
        both = [name for name in result.metrics if name in recorded]
        pairs = {name: (recorded[name], _as_json(result.metrics[name])) for name in both}
        unlike = [Difference(name=n, recorded=then, recomputed=now) for n, (then, now) in pairs.items() if then != now]
        self.compared.metrics += len(both)
        self.compared.note(head.step, unlike)
        return result

    def compare(self) -> None:
        """Compare weights and moments with the checkpoint of the last step taken, which is loaded, if there is one."""
        if self.step not in checkpoints(self.run_dir):
            return
        with self.learner.policy.masters.in_place():
            mine = {name: _local(tensor).clone() for name, tensor in self._tensors()}
            self.load(self.step)
            theirs = {name: _local(tensor) for name, tensor in self._tensors()}
            unlike = [found for name, tensor in theirs.items() if (found := _difference(name, tensor, mine[name]))]
        of_ranks = self.ranks.gather_json([asdict(one) for one in unlike])
        first = {one["name"]: Difference(**one) for found in reversed(of_ranks) for one in found}
        self.compared.tensors = len(theirs)
        self.compared.note(self.step, [first[name] for name in theirs if name in first])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, state in tensors_of(self.learner, self.critic).items():
            yield from _leaves(name, state)


def checkpoint(run_dir: Path, step: int) -> Path:
    """Return the directory of a checkpoint.

    Raises:
        ConfigurationError: it is damaged.
    """
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    if (reason := damage(path)) is not None:
        raise ConfigurationError(f"checkpoint {path} cannot be used: {reason}")
    return path


def checkpoints(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in order, after 0, the step of the model with which it began."""
    return [0, *saved_steps(run_dir / "checkpoints")]


class SettingsAsRecorded(TrainerSettings):
    """The trainer's settings as a record has them; variables of this process count for nothing."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: Any, init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the arguments alone."""
        return (init_settings,)


def _settings(run_dir: Path, head: StepHead) -> SettingsAsRecorded:
    """Return the settings that a step had.

    Raises:
        ConfigurationError: a value is not allowed, or does not fit the others.
    """
    recorded: dict[str, Any] = head.settings | {"compute_type": head.computation.compute_type}
    if recorded.get("sources"):
        recorded["sources"] = run_dir / "sources.yaml"
    return SettingsAsRecorded.load(**recorded | {"shared_dir": run_dir.parent.parent, "run_id": run_dir.name})


def _as_json(number: float) -> float | None:
    value: float | None = orjson.loads(orjson.dumps(number))
    return value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested state by their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part)


def _difference(name: str, recorded: Tensor, recomputed: Tensor) -> Difference | None:
    """Return how two tensors differ, to the bit; None if they are equal."""
    unlike = recorded.contiguous().view(-1).view(torch.uint8) != recomputed.contiguous().view(-1).view(torch.uint8)
    if not unlike.any():
        return None
    places = unlike.view(recorded.numel(), -1).any(dim=1).nonzero().view(-1)
    then, now = (x.reshape(-1)[places].double() for x in (recorded, recomputed))
    return Difference(
        name=name,
        recorded=_as_json(then[0].item()),
        recomputed=_as_json(now[0].item()),
        elements=len(places),
        largest=_as_json((then - now).abs().max().item()),
    )
