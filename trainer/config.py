"""The trainer's settings: one typed class, read from environment variables of the same names in capitals.

docs/configuration.md is generated from the descriptions below.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from services.core.compute import AUTO_RULE, ComputeType
from services.core.settings import Settings
from services.protocol import SampleStrategy
from trainer.algorithm.methods import AdvantageMethod, Aggregation, KLEstimator


class Mode(StrEnum):
    """How generation and training share time."""

    SYNC = "sync"
    ASYNC = "async"


class Loss(StrEnum):
    """The policy loss."""

    CLIPPED = "clipped"
    GSPO = "gspo"
    CISPO = "cispo"


class ImportanceCorrection(StrEnum):
    """What corrects for sampling by another policy, or another engine, than the trainer's at the start of the step.

    With ``none`` the ratio's denominator is the behaviour policy itself. Otherwise it is the proximal policy, the
    trainer's own at the start of the step, and each token is weighted by proximal over behaviour: the decoupled
    objective.
    """

    NONE = "none"
    TRUNCATED = "truncated"
    ICEPOP = "icepop"


class Schedule(StrEnum):
    """How the learning rate goes after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Transport(StrEnum):
    """How new weights reach the rollout workers."""

    DISK = "disk"
    BROADCAST = "broadcast"


class PublishedType(StrEnum):
    """The number format of published weights."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class TrainerSettings(Settings):
    """Everything that tunes a run."""

    # What is trained, and for how long
    model_name: str = Field(
        default="Qwen/Qwen2.5-0.5B-Instruct", min_length=1, description="Hugging Face name or local directory."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")
    num_epochs: int = Field(default=3, ge=1, description="Passes over the training prompts.")
    batch_size: int = Field(default=4, ge=1, le=4096, description="Prompts a step.")
    max_steps: int = Field(default=0, ge=0, description="Stop after this many steps even within an epoch; 0: no limit.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of everything random.")
    mode: Mode = Field(
        default=Mode.SYNC,
        description="`sync`: generate, then train. `async`: collectors generate while the step trains.",
    )

    # Generation
    group_size: int = Field(default=8, ge=1, le=1024, description="Completions of each prompt (G).")
    max_new_tokens: int = Field(default=512, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        default=1.0, gt=0, le=10, description="Sampling temperature; training uses the same distribution."
    )
    generation_concurrency: int = Field(default=64, ge=1, description="Prompts in flight at once.")
    generation_deadline_seconds: float = Field(
        default=600,
        gt=0,
        description="Longest wait for one prompt's completions once it is in flight, retries included.",
    )
    engine_deterministic: bool = Field(
        default=False,
        description="As rollout-server's: completions are then asked for one by one, each with a seed of its own.",
    )
    dynamic_sampling_tries: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Replace groups without reward variance by further prompts, at most this many times a step (DAPO).",
    )
    overlong_buffer: int = Field(
        default=0,
        ge=0,
        description="Tokens before MAX_NEW_TOKENS over which a penalty falls from 0 to -1; 0: no penalty.",
    )

    # The algorithm
    advantage: AdvantageMethod = Field(default=AdvantageMethod.GRPO, description="`grpo`, `dr_grpo` or `rloo`.")
    advantage_eps: float = Field(default=1e-4, ge=0, description="Added to a group's standard deviation (`grpo`).")
    loss: Loss = Field(
        default=Loss.CLIPPED,
        description="`clipped` (PPO's surrogate), `gspo` (one ratio a completion) or `cispo` (clipped weights).",
    )
    clip_low: float = Field(default=0.2, ge=0, le=1, description="Distance of the ratio's lower bound from 1.")
    clip_high: float = Field(default=0.2, ge=0, le=10, description="Distance of the ratio's upper bound from 1.")
    dual_clip: float | None = Field(default=None, gt=1, description="Bound of dual clip; unset: off.")
    aggregation: Aggregation = Field(
        default=Aggregation.TOKEN_MEAN, description="`token_mean`, `sequence_mean` or `constant_length`."
    )
    importance_correction: ImportanceCorrection = Field(
        default=ImportanceCorrection.NONE,
        description="`none`: the ratio is against the behaviour policy. `truncated`, `icepop`: against the policy at "
        "the start of the step, each token weighted for having been sampled by an older one (decoupled objective).",
    )
    importance_cap: float = Field(default=2.0, gt=0, description="Cap of truncated importance weights (C).")
    icepop_low: float = Field(default=0.5, ge=0, description="Tokens whose ratio is below are left out (`icepop`).")
    icepop_high: float = Field(default=5.0, gt=0, description="Tokens whose ratio is above are left out (`icepop`).")
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of KL to the reference; 0 keeps no reference model.")
    kl_estimator: KLEstimator = Field(default=KLEstimator.K3, description="`k1`, `k2` or `k3`.")
    entropy_coef: float = Field(default=0.0, description="Weight of the entropy bonus.")
    updates_per_batch: int = Field(
        default=1, ge=1, le=64, description="Optimizer steps a batch; each takes an equal share of its groups."
    )

    # Replay (step 7)
    replay_groups: int = Field(
        default=2, ge=0, le=4096, description="Groups sampled from the replay buffer for an additional update; 0: off."
    )
    replay_every: int = Field(default=1, ge=1, description="Do the additional update every so many steps.")
    replay_strategy: SampleStrategy = Field(
        default=SampleStrategy.PRIORITY, description="`priority`, `recency` or `uniform`."
    )
    replay_exponent: float = Field(default=1.0, ge=0, le=10, description="Alpha of prioritised replay.")
    replay_correction: float = Field(default=0.4, ge=0, le=1, description="Beta of prioritised replay.")
    replay_max_staleness: int = Field(default=8, ge=1, description="Oldest group that is replayed, in policy versions.")

    # Asynchronous mode
    max_staleness: int = Field(
        default=4, ge=0, description="Oldest fresh group that is trained on, in policy versions (`async`)."
    )
    collector_in_process: bool = Field(
        default=True, description="Run a collector beside the trainer (`async`); off when collectors run elsewhere."
    )
    fresh_wait_seconds: float = Field(
        default=900, gt=0, description="Longest wait for enough fresh groups before the run ends (`async`)."
    )

    # The optimizer
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Schedule = Field(default=Schedule.CONSTANT, description="`constant`, `linear` or `cosine`.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first beta.")
    adam_beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW's second beta.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    max_skipped_steps: int = Field(
        default=3, ge=0, description="Non-finite updates in a row that are skipped before the run stops."
    )

    # How it computes
    compute_type: ComputeType = Field(
        default=ComputeType.AUTO,
        description="The type of numbers of forward and backward passes: `float32`, `bfloat16` or `auto`. `auto` is "
        f"{AUTO_RULE}; all ranks take the same type. Master weights are always float32.",
    )
    micro_batch_tokens: int = Field(
        default=16_384,
        ge=1,
        description="Tokens in one forward and backward pass of a rank, which also bound the padding inside attention.",
    )
    logit_chunk_tokens: int = Field(
        default=256, ge=1, description="Completion tokens whose logits exist at the same time."
    )
    activation_checkpointing: bool = Field(default=False, description="Recompute layers in the backward pass.")
    shard_parameters: bool = Field(
        default=True,
        description="Free gathered parameters between forward and backward and reduce gradients every micro-batch "
        "(least memory); off: gather and reduce once a step (least traffic).",
    )
    keep_memory: bool = Field(
        default=False,
        description="Keep what a step freed for the next, instead of giving it back to the system for others on the "
        "machine: on a CPU steps are a sixth shorter. Engines have a setting of that name, too.",
    )
    lora_rank: int = Field(default=0, ge=0, description="Train LoRA adapters of this rank; 0: the whole model.")
    lora_alpha: float = Field(default=32.0, gt=0, description="LoRA scale, divided by the rank.")

    # Publishing weights
    publish_transport: Transport = Field(
        default=Transport.DISK,
        description="`disk`: through the shared volume. `broadcast`: NCCL or gloo to the workers.",
    )
    publish_type: PublishedType = Field(default=PublishedType.BFLOAT16, description="`bfloat16` or `float32`.")
    publish_in_place: bool = Field(
        default=False,
        description="Change weights under generations in flight, which go on with the new ones; each token's version "
        "is recorded. Off: they end first.",
    )
    publish_bucket_mib: float = Field(
        default=1024,
        gt=0,
        description="Weights sent in one go by `broadcast`: memory that a worker needs beside its own weights.",
    )
    publish_deadline_seconds: float = Field(default=600, gt=0, description="Longest wait for a worker to take weights.")
    published_versions_kept: int = Field(
        default=2, ge=1, description="Versions kept on the shared volume, beside what a worker is loading."
    )
    publish_probe: bool = Field(
        default=False, description="After publishing, compare each worker's logprobs of a probe with the trainer's."
    )
    publish_probe_tolerance: float = Field(
        default=0.1, gt=0, description="Mean difference of a probe's logprobs above which a worker leaves the routing."
    )
    min_workers: int = Field(default=1, ge=1, description="The run stops when fewer rollout workers are left.")

    # Evaluation and checkpoints
    eval_every: int = Field(default=0, ge=0, description="Evaluate every so many steps; 0: at the start and end only.")
    eval_prompts: int = Field(
        default=128,
        ge=0,
        description="Held-out prompts of an evaluation (n); 0: no evaluation. The standard error of accuracy p is "
        "sqrt(p(1-p)/n): at most 0.045 for 128.",
    )
    eval_samples: int = Field(default=0, ge=0, description="Also sample so many completions: avg@k and pass@k; 0: off.")
    target_accuracy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Stop early when greedy pass@1 on the EVAL_PROMPTS held-out prompts is at least this. "
        "The point estimate is compared, without regard to its standard error.",
    )
    checkpoint_every: int = Field(default=25, ge=0, description="Checkpoint every so many steps; 0: at the end only.")
    checkpoints_kept: int = Field(
        default=2,
        ge=1,
        description="Newest checkpoints that are kept, beside the best one: that with the highest greedy pass@1 on the "
        "EVAL_PROMPTS held-out prompts, a point estimate.",
    )

    # Services, logs
    service_deadline_seconds: float = Field(
        default=300, gt=0, description="How long a service may be unreachable before the run ends as recoverable."
    )
    engine_start_seconds: float = Field(
        default=1800,
        gt=0,
        description="How long an engine may take to start. When the trainer starts, it waits for services and workers "
        "for SERVICE_DEADLINE_SECONDS more than this.",
    )
    logged_groups: int = Field(default=4, ge=0, description="Groups a step written to samples.jsonl.")
    wandb_api_key: SecretStr | None = Field(default=None, description="When set, metrics also go to Weights & Biases.")
    wandb_project: str = Field(default="grpo", min_length=1, description="Weights & Biases project.")

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if self.overlong_buffer >= self.max_new_tokens:
            raise ValueError(
                f"OVERLONG_BUFFER is {self.overlong_buffer}; allowed is less than "
                f"MAX_NEW_TOKENS ({self.max_new_tokens})"
            )
        if self.icepop_low >= self.icepop_high:
            raise ValueError(f"ICEPOP_LOW is {self.icepop_low}; allowed is less than ICEPOP_HIGH ({self.icepop_high})")
        if self.updates_per_batch > self.batch_size:
            raise ValueError(
                f"UPDATES_PER_BATCH is {self.updates_per_batch}; allowed is at most BATCH_SIZE ({self.batch_size})"
            )
        return self

    @property
    def start_deadline_seconds(self) -> float:
        """How long services and workers may take to come up when the trainer starts."""
        return self.engine_start_seconds + self.service_deadline_seconds

    def longest_generation(self, prompts: int) -> float:
        """Seconds after which so many prompts are generated or given up, GENERATION_CONCURRENCY of them at once."""
        return math.ceil(prompts / self.generation_concurrency) * self.generation_deadline_seconds

    @property
    def batch_deadline_seconds(self) -> float:
        """How long the groups of one step may take: generated twice over, in every round of dynamic sampling."""
        rounds = self.dynamic_sampling_tries + 1
        return rounds * 2 * self.longest_generation(self.batch_size) + self.fresh_wait_seconds

    @property
    def evaluation_deadline_seconds(self) -> float:
        """How long an evaluation may take."""
        return 5 * self.longest_generation(self.eval_prompts)

    @property
    def collective_deadline_seconds(self) -> float:
        """How long a rank waits for the others: twice what rank 0 may need for anything while they wait."""
        return 2 * max(
            self.start_deadline_seconds,
            self.batch_deadline_seconds,
            self.evaluation_deadline_seconds,
            # A broadcast is five waits: to write, join, pause, send and load (trainer/publishing/broadcast.py).
            5 * self.publish_deadline_seconds,
        )

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are kept."""
        return self.run_dir / "checkpoints"
