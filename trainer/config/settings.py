"""The trainer's settings: one typed class, read from environment variables of the same names in capitals.

Each section of the settings is a base class of ``TrainerSettings``. A value that nobody has reason to change is a
constant in the module that uses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import model_validator

from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.machine import ComputeType
from services.core.settings import EnginesSection, Method, SourcesSettings
from services.protocol.base import MAX_SEQUENCES
from trainer.algorithm.methods import (
    ADVANTAGES,
    GROUP_ADVANTAGES,
    LONE_GROUP_ADVANTAGES,
    LOSS_OPTIONS,
    LOSSES,
    Aggregation,
    Credit,
    ImportanceCorrection,
    LossMethod,
    is_own_function,
)
from trainer.config.sections import (
    SELF,
    AlgorithmSection,
    CriticModel,
    CriticSection,
    DistillationSection,
    EvaluationSection,
    MemorySection,
    Mode,
    OptimisationSection,
    PublishedType,
    PublishingSection,
    Rollout,
    RunSection,
    SamplingSection,
    Transport,
)

_WEIGHT = re.compile(r"(?P<name>[^=]+)=(?P<weight>-?\d+(\.\d+)?)")

HIGHEST_RATE = 1e-2
"""The highest learning rate without a caution."""
LEAST_CONCURRENCY = 64
"""Prompts in flight at once if a batch has fewer, so that an evaluation keeps the engines busy."""


class TrainerSettings(
    RunSection,
    SamplingSection,
    AlgorithmSection,
    CriticSection,
    DistillationSection,
    OptimisationSection,
    MemorySection,
    PublishingSection,
    EnginesSection,
    EvaluationSection,
    SourcesSettings,
):
    """All settings of the trainer, section by section.

    With SOURCES those that a source may set are only its defaults; ``by_source`` has what they are for each.
    """

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        # With SOURCES the settings of each source were checked when they were read.
        for contradictions in OF_A_SOURCE if self.sources is None else (_over_all_sources,):
            for sentence in contradictions(self):
                raise ValueError(sentence)
        return self

    @property
    def epochs(self) -> float:
        """The epochs after which prompts are used up: NUM_EPOCHS; infinite with SOURCES, which end with MAX_STEPS."""
        return self.num_epochs if self.sources is None else math.inf

    def total_steps(self, train_prompts: int, steps_taken: int = 0, prompts_used: int = 0) -> int:
        """Return the number of steps of a run with ``train_prompts`` training prompts.

        After some steps another BATCH_SIZE may divide the prompts that are left.

        Raises:
            ConfigurationError: they are too few for one step.
        """
        if self.sources is not None:
            return self.max_steps
        prompts = self.num_epochs * train_prompts
        if prompts < self.batch_size:
            raise ConfigurationError(
                f"BATCH_SIZE is {self.batch_size}, but the data have {train_prompts} prompt{'s'[: train_prompts != 1]} "
                f"to train on, {prompts} in NUM_EPOCHS={self.num_epochs}: not one step; "
                f"set BATCH_SIZE={train_prompts}, or give more rows"
            )
        steps = max(prompts // self.batch_size, steps_taken + (prompts - prompts_used) // self.batch_size)
        return min(steps, self.max_steps or steps)

    @property
    def cautions(self) -> list[str]:
        """A sentence for each setting that is allowed, but has no effect or probably not the intended one."""
        return list(_cautions(self))

    @property
    def publishes_in_place(self) -> bool:
        """True when weights change under generations in flight: PUBLISH_IN_PLACE, or the default of the mode."""
        return self.mode is Mode.ASYNC if self.publish_in_place is None else self.publish_in_place

    @property
    def whole_batch_reason(self) -> str:
        """The setting for which a step needs its whole batch, or the engines' GPUs, to train; "" without one."""
        needs = {
            f"METHOD={self.method}": self.method is not Method.RL,
            f"MODE={self.mode}": self.mode is not Mode.SYNC,
            "ENGINE_SLEEPS": self.engine_sleeps,
            "UPDATES_PER_BATCH": self.updates_per_batch > 1,
            "EPOCHS_PER_BATCH": self.epochs_per_batch > 1,
            "DYNAMIC_SAMPLING_TRIES": self.dynamic_sampling_tries > 0,
            "KL_IN_REWARD": self.kl_in_reward,
            # The distance from a teacher has a denominator of its own, and baselines of the whole batch.
            "TEACHER_MODEL": bool(self.teacher_models),
            "TEACHER_URL": any(own.teacher_url for own in self.by_source().values()),
            f"ADVANTAGE={self.advantage}": self.advantage not in LONE_GROUP_ADVANTAGES,
        }
        return next((setting for setting, is_needed in needs.items() if is_needed), "")

    def trains_while_generating(self, *, are_tiers_apart: bool) -> bool:
        """Return whether a step trains on its first groups while the others are generated.

        ``are_tiers_apart`` says that engines and trainer have GPUs or nodes of their own.
        """
        if self.train_while_generating != "auto":
            return self.train_while_generating
        return are_tiers_apart and not self.whole_batch_reason

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's functions among AGENT (where agents play), LOSS and ADVANTAGE, by variable.

        That of a source has the source's name behind it, as in ``AGENT of maths``.
        """
        agents = {
            f"AGENT of {source}" if source else "AGENT": settings.agent
            for source, settings in self.by_source().items()
            if settings.rollout is Rollout.AGENT
        }
        named = {**agents, "LOSS": self.loss, "ADVANTAGE": self.advantage}
        return {variable: name for variable, name in named.items() if is_own_function(name)}

    @property
    def has_critic(self) -> bool:
        """True when advantages need values."""
        return self.advantage == "gae"

    @property
    def teacher(self) -> str:
        """The teacher, as a model's name or a URL; "" without one. With SOURCES ask the settings of a source."""
        return self.teacher_model or self.teacher_url

    @property
    def teachers(self) -> dict[str, str]:
        """The teacher of each source by the source's name; "" for a source without one."""
        return {source: settings.teacher for source, settings in self.by_source().items()}

    @property
    def teacher_models(self) -> list[str]:
        """The models that are teachers of some source, each once."""
        names = {settings.teacher_model for settings in self.by_source().values()}
        return sorted(names - {""})

    @property
    def agent_commands(self) -> list[str]:
        """The programs that play the episodes of some source, each once."""
        return sorted({own.agent_command for own in self.by_source().values() if own.rollout is Rollout.PROGRAM})

    @property
    def learns_from_rewards(self) -> bool:
        """True when the policy learns from the rewards of its answers."""
        return self.method is Method.RL and self.reward_weight > 0

    @property
    def evaluates(self) -> bool:
        """True when the run is evaluated on held-out prompts; with METHOD=sft only if EVAL_EVERY asks for it."""
        return self.eval_prompts > 0 and (self.method is Method.RL or self.eval_every > 0)

    @property
    def needs_engines(self) -> bool:
        """True when engines answer prompts, of training or of evaluations."""
        return self.method is Method.RL or self.evaluates

    @property
    def needs_rewards(self) -> bool:
        """True when the reward-server scores answers: to learn from rewards, or for the accuracy of evaluations."""
        return self.learns_from_rewards or self.evaluates

    @property
    def trained_temperature(self) -> float:
        """The temperature of the distribution that is trained: TEMPERATURE, at which answers are sampled, or 1."""
        return self.temperature if self.method is Method.RL else 1.0

    @property
    def component_weights(self) -> dict[str, float] | None:
        """GDPO_WEIGHTS by component; None if it is unset, and empty if it cannot be read."""
        if self.gdpo_weights is None:
            return None
        parts = [_WEIGHT.fullmatch(part.strip()) for part in self.gdpo_weights.split(",")]
        weights = {part["name"]: float(part["weight"]) for part in parts if part}
        return weights if len(weights) == len(parts) else {}

    @property
    def has_kl_loss(self) -> bool:
        """True when the KL to the reference is added to the loss."""
        return self.kl_coef != 0 and not self.kl_in_reward

    @property
    def learns_beyond_advantages(self) -> bool:
        """True when groups whose advantages are all 0 add to the policy's loss: by KL, entropy, values or a teacher."""
        has_values = self.has_critic and self.critic is CriticModel.SHARED
        terms = (self.has_kl_loss, self.entropy_coef != 0, has_values, any(self.teachers.values()))
        return self.method is Method.SFT or any(terms)

    @property
    def loss_method(self) -> LossMethod:
        """LOSS as its paper has it; a function of the user's has no paper's values."""
        return LOSSES.get(self.loss, LossMethod())

    @property
    def loss_aggregation(self) -> Aggregation:
        """The mean over token losses: AGGREGATION, or that of the loss's paper."""
        return self.aggregation or self.loss_method.aggregation

    @property
    def loss_importance_cap(self) -> float | None:
        """The largest importance weight: IMPORTANCE_CAP, or what LOSS needs; None: that of the correction's paper."""
        is_truncated = self.importance_correction is ImportanceCorrection.TRUNCATED
        return self.loss_method.importance_cap if self.importance_cap is None and is_truncated else self.importance_cap

    @property
    def saved_type(self) -> PublishedType:
        """The number format of the trained model: the published one; of merged adapters float32."""
        return PublishedType.FLOAT32 if self.lora_rank else self.publish_type

    @property
    def wanted_compute(self) -> ComputeType:
        """COMPUTE_TYPE; `auto` is float32 with PUBLISH_TYPE=float32, because the policy has one number format."""
        is_exact = self.publish_type is PublishedType.FLOAT32 and self.compute_type is ComputeType.AUTO
        return ComputeType.FLOAT32 if is_exact else self.compute_type

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def services(self) -> tuple[Task, ...]:
        """The services that the run asks, over all sources."""
        asked = {
            Task.DATA_SERVER: True,
            Task.REWARD_SERVER: self.needs_rewards,
            Task.REPLAY_BUFFER: self.method is Method.RL,
            Task.ROLLOUT_SERVER: self.needs_engines,
        } | {task: self.needs_engines for s in self.by_source().values() for task in s.way.services}
        return tuple(task for task, is_asked in asked.items() if is_asked)

    @property
    def longest_answer(self) -> int:
        """Most tokens that the model samples for one answer to a prompt, over all sources."""
        return max(settings.answer_tokens for settings in self.by_source().values())

    @property
    def largest_group(self) -> int:
        """The largest GROUP_SIZE of all sources; what is learned as it is, is a group of one."""
        return 1 if self.method is Method.SFT else max(settings.group_size for settings in self.by_source().values())

    @property
    def generation_concurrency(self) -> int:
        """Prompts in flight at once: a whole batch, so that no engine waits for the others."""
        return max(self.batch_size, LEAST_CONCURRENCY)

    @property
    def start_deadline_seconds(self) -> float:
        """Longest wait for services and workers when the trainer starts."""
        return self.engine_start_seconds + self.service_deadline_seconds

    @property
    def checkpoint_dir(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.run_dir / "checkpoints"


def _cautions(settings: TrainerSettings) -> Iterator[str]:
    method, correction, rate = settings.loss_method, settings.importance_correction, settings.learning_rate
    bounds = [name.upper() for name in LOSS_OPTIONS if getattr(settings, name) is not None]
    is_decoupled = correction is not ImportanceCorrection.NONE and not (method.truncates or method.bounds_behaviour)
    if bounds and settings.loss in LOSSES and settings.updates_per_step == 1 and is_decoupled:
        yield (
            f"{', '.join(bounds)} {'has' if len(bounds) == 1 else 'have'} no effect with one update a batch, where the "
            "ratio to the policy at the start of the step is 1; IMPORTANCE_CAP bounds the weight of stale tokens"
        )
    if settings.loss == "gspo" and correction not in (ImportanceCorrection.NONE, ImportanceCorrection.SEQUENCE):
        yield f"LOSS=gspo weighs completions, and IMPORTANCE_CORRECTION={correction} tokens; set it to sequence or none"
    if settings.drop_equal_groups and settings.learns_beyond_advantages:
        yield "DROP_EQUAL_GROUPS has no effect with a KL loss, ENTROPY_COEF or CRITIC=shared, which use such groups"
    if rate > HIGHEST_RATE:
        yield f"LEARNING_RATE={rate:g} is far above what models learn at, 1e-7 to 1e-3: it will likely ruin the policy"


# Contradictions between settings: each function yields a sentence for one, with the variable, its value and a remedy.


def _over_all_sources(settings: TrainerSettings) -> Iterator[str]:
    if settings.sources is not None and not settings.max_steps:
        yield "MAX_STEPS is 0, but the epochs of SOURCES have different lengths; set MAX_STEPS, the steps of the run"
    limits = {source: own.max_new_tokens for source, own in settings.by_source().items()}
    if settings.overlong_buffer and len(set(limits.values())) > 1:
        each = ", ".join(f"{source} {limit}" for source, limit in limits.items())
        yield f"OVERLONG_BUFFER is set, but the sources have different MAX_NEW_TOKENS ({each}); give them one limit"


def _of_rollouts(settings: TrainerSettings) -> Iterator[str]:
    agent, opponent = settings.agent, settings.opponent
    if settings.rollout is Rollout.AGENT and not is_own_function(agent):
        yield f"AGENT is {agent!r}, but ROLLOUT is agent; give the agent as module:function"
    if settings.rollout is Rollout.PROGRAM and not settings.agent_command.strip():
        yield "AGENT_COMMAND is empty, but ROLLOUT is program; give the agent as a shell command"
    is_game = settings.rollout is Rollout.ENVIRONMENT
    if is_game and opponent != SELF and not opponent.startswith(("http://", "https://")):
        yield f"OPPONENT is {opponent!r}; allowed: `self` or a URL such as http://host:port"
    if not settings.way.has_turns:
        return
    most, turn = settings.agent_max_tokens, settings.max_new_tokens
    if most < turn:
        yield f"AGENT_MAX_TOKENS is {most}; allowed is at least MAX_NEW_TOKENS ({turn}), the longest turn"
    if (count := settings.group_size * settings.agent_max_turns) > MAX_SEQUENCES:
        limit = f"{MAX_SEQUENCES}, the most sequences of a group"
        yield f"GROUP_SIZE times AGENT_MAX_TURNS is {count}; allowed is at most {limit}"


def _of_lengths(settings: TrainerSettings) -> Iterator[str]:
    buffer, limit, has_turns = settings.overlong_buffer, settings.max_new_tokens, settings.way.has_turns
    if buffer >= limit:
        yield f"OVERLONG_BUFFER is {buffer}; allowed is less than MAX_NEW_TOKENS ({limit})"
    if buffer and has_turns:
        yield f"OVERLONG_BUFFER is set, but ROLLOUT is {settings.rollout}; unset it, the agent gives the rewards"
    if settings.credit is Credit.TURN and not has_turns:
        yield "CREDIT is turn, but completions have one turn; unset CREDIT"
    if settings.updates_per_batch > settings.batch_size:
        updates, batch = settings.updates_per_batch, settings.batch_size
        yield f"UPDATES_PER_BATCH is {updates}; allowed is at most BATCH_SIZE ({batch})"


def _of_engines(settings: TrainerSettings) -> Iterator[str]:
    if settings.colocate and not settings.engine_sleeps:
        yield "COLOCATE is set, but engines would keep the trainer's memory; set ENGINE_SLEEPS=true, or unset COLOCATE"
    if not settings.engine_sleeps:
        return
    if settings.method is Method.SFT:
        yield "ENGINE_SLEEPS is set, but METHOD=sft learns rows as they are; unset it, or set METHOD=rl"
    if settings.mode is Mode.ASYNC:
        yield "ENGINE_SLEEPS is set, but with MODE=async no engine can sleep; set MODE=sync, or unset ENGINE_SLEEPS"
    if settings.publish_transport is Transport.BROADCAST and not settings.lora_rank:
        yield "ENGINE_SLEEPS is set, but NCCL joins no two processes on one GPU; set PUBLISH_TRANSPORT=disk or local"


def _of_waves(settings: TrainerSettings) -> Iterator[str]:
    if settings.train_while_generating is True and (reason := settings.whole_batch_reason):
        yield f"TRAIN_WHILE_GENERATING is set, but {reason} needs the whole batch; leave it at auto, or unset {reason}"


def _of_weights(settings: TrainerSettings) -> Iterator[str]:
    rank, transport, offloads = settings.lora_rank, settings.publish_transport, settings.cpu_offload is True
    is_float32 = settings.publish_type is PublishedType.FLOAT32
    if transport is Transport.LOCAL and rank:
        yield f"PUBLISH_TRANSPORT is local, but adapters (LORA_RANK={rank}) are not shared in memory; set disk"
    if settings.compute_type is ComputeType.BFLOAT16 and is_float32:
        yield "PUBLISH_TYPE is float32, but COMPUTE_TYPE=bfloat16 computes another policy; set both alike"
    if offloads and rank:
        yield "CPU_OFFLOAD is set, but the state of adapters (LORA_RANK) is small; unset it, and shard over more GPUs"
    if offloads and settings.shard_parameters is False:
        yield "CPU_OFFLOAD is set, but SHARD_PARAMETERS=false keeps all parameters on the GPU; set it to auto"


def _of_methods(settings: TrainerSettings) -> Iterator[str]:
    loss, advantage = settings.loss, settings.advantage
    for variable, name, names in (("ADVANTAGE", advantage, ADVANTAGES), ("LOSS", loss, tuple(LOSSES))):
        if name not in names and not is_own_function(name):
            yield f"{variable} is {name!r}; allowed is {', '.join(names)}, or module:function"
    for option in LOSS_OPTIONS if loss in LOSSES else ():
        if getattr(settings, option) is not None and option not in LOSSES[loss].options:
            yield f"{option.upper()} has no effect with LOSS={loss}; unset it"
    is_truncated = settings.importance_correction is ImportanceCorrection.TRUNCATED and settings.loss_method.truncates
    if settings.importance_cap is not None and is_truncated and settings.updates_per_step == 1:
        yield f"IMPORTANCE_CAP is set, but LOSS={loss} truncates the weight of a token itself; set CLIP_HIGH instead"
    # Collectors elsewhere may bring advantages of their own.
    is_made_here = settings.learns_from_rewards and (settings.mode is Mode.SYNC or settings.collector_in_process)
    if settings.group_size == 1 and advantage in GROUP_ADVANTAGES and is_made_here:
        yield f"GROUP_SIZE is 1, but ADVANTAGE={advantage} compares completions; set 2, or ADVANTAGE=reinforce or gae"


UNFIT: Mapping[str, tuple[tuple[str, ...], str]] = {
    "maxrl": (("overlong_buffer", "kl_in_reward", "over_limit_reward", "credit"), "needs one reward of 0 or 1 each"),
    "gdpo": (("overlong_buffer", "kl_in_reward", "credit"), "needs its change of the sum as a reward function"),
    "rae": (("credit",), "has one baseline for each seat, and none for its turns"),
}
"""The settings that an advantage does not fit, with the reason."""


def _of_rewards(settings: TrainerSettings) -> Iterator[str]:
    unfit, reason = UNFIT.get(settings.advantage, ((), ""))
    for name in unfit:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            yield f"{name.upper()} is set, but ADVANTAGE={settings.advantage} {reason}; unset one of them"
    weights = settings.gdpo_weights
    if weights is not None and not any((settings.component_weights or {}).values()):
        yield f"GDPO_WEIGHTS is {weights!r}; give names with =weight, one of them not 0, as in math=1,format=0.5"


def _of_teachers(settings: TrainerSettings) -> Iterator[str]:
    model, url = settings.teacher_model, settings.teacher_url
    if model and url:
        yield f"TEACHER_MODEL is {model!r} and TEACHER_URL {url!r}, but a prompt has one teacher; unset one of them"
    if model.rstrip("/") == settings.model_name.rstrip("/"):
        yield f"TEACHER_MODEL is {model!r}, the student (MODEL_NAME); name another model, or use KL_COEF to stay near"
    if url and settings.temperature != 1:
        yield "TEACHER_URL is set, but engines score tokens at temperature 1; set TEMPERATURE=1, or TEACHER_MODEL"
    if settings.drop_equal_groups and settings.teacher:
        yield "DROP_EQUAL_GROUPS is set, but a teacher teaches groups of equal rewards, too; unset it"
    if not settings.reward_weight and not settings.teacher:
        yield "REWARD_WEIGHT is 0 and there is no teacher, so nothing is learned; set TEACHER_MODEL"


OF_A_SOURCE = (_of_rollouts, _of_lengths, _of_engines, _of_waves, _of_weights, _of_methods, _of_rewards, _of_teachers)
"""The contradictions within the settings of a source, in the order in which they are looked for."""
