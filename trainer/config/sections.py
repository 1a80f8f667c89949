"""The sections of the trainer's settings; docs/configuration.md is generated from the texts below the fields."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from services.core.endpoints import Task
from services.core.machine import ComputeType
from services.core.settings import (
    AgentFunction,
    AgentProgram,
    AnswerSettings,
    EpisodeLimits,
    MemorySettings,
    MethodSettings,
    ModelSettings,
    RewardWeightSettings,
    Settings,
)
from services.protocol.rewards import LARGEST_REWARD
from trainer.algorithm.methods import (
    Aggregation,
    Credit,
    ImportanceCorrection,
)


class Mode(StrEnum):
    """The order of generation and training."""

    SYNC = "sync"
    ASYNC = "async"


class Layout(StrEnum):
    """The form of micro-batches."""

    AUTO = "auto"
    TREE = "tree"
    ROWS = "rows"


class CriticModel(StrEnum):
    """The model that the critic's value head stands on."""

    OWN = "own"
    SHARED = "shared"


SELF = "self"
"""OPPONENT of self-play."""


class Rollout(StrEnum):
    """The way in which a prompt is answered."""

    COMPLETION = "completion"
    AGENT = "agent"
    PROGRAM = "program"
    ENVIRONMENT = "environment"


class Way(NamedTuple):
    """A way of rolling out, as far as ROLLOUT decides it."""

    sampler: str
    """The path of the subclass of trainer.rollouts.groups.Sampler that answers prompts. A class would be imported where
    settings are read and nothing is trained."""
    services: tuple[Task, ...] = ()
    """The services that the run needs besides those of every run."""

    @property
    def has_turns(self) -> bool:
        """True where an answer is an episode, which the gateway records and which may have several turns."""
        return Task.GATEWAY in self.services


WAYS = {
    Rollout.COMPLETION: Way("trainer.rollouts.groups:Completions"),
    Rollout.AGENT: Way("trainer.rollouts.episodes:Agents", (Task.GATEWAY,)),
    Rollout.PROGRAM: Way("trainer.rollouts.episodes:Agents", (Task.GATEWAY,)),
    Rollout.ENVIRONMENT: Way("trainer.rollouts.game:Games", (Task.GATEWAY, Task.ENVIRONMENT_SERVER)),
}


class Schedule(StrEnum):
    """The course of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Transport(StrEnum):
    """The transport of new weights to the rollout workers."""

    DISK = "disk"
    BROADCAST = "broadcast"
    LOCAL = "local"


class PublishedType(StrEnum):
    """The number format of published weights."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def _steps_to_record(value: object) -> object:
    if value is None or value in ("off", "all"):
        return value
    if not (str(value).isdecimal() and int(str(value)) >= 1):
        raise ValueError("give off, a number of steps from 1 on, or all")
    return int(str(value))


Checkpointing = bool | Literal["selective"]
"""The layers that are recomputed in the backward pass: all, none, or the parts that the compiler chooses."""
SELECTIVE_BUDGET = 0.5
"""The most of its activations, besides its input, that a compiled layer keeps with selective recomputation."""
RecordGroups = Annotated[Literal["off", "all"] | int, BeforeValidator(_steps_to_record)]
"""The steps whose groups are recorded."""


def steps_of(text: str) -> range:
    """Return the steps that ``10`` or ``10:12`` names, the last one included; none for an empty text.

    Raises:
        ValueError: the text names something else.
    """
    if not text:
        return range(0)
    first, last = text.split(":", 1) if ":" in text else (text, text)
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError("give a step or a range of steps, such as 10 or 10:12")
    return range(int(first), int(last) + 1)


def _named_steps(value: str) -> str:
    steps_of(value)
    return value


class ModeSection(Settings):
    """The order of generation and training."""

    read_with = "METHOD=rl"

    mode: Mode = Mode.SYNC
    """`sync`: generate, then train. `async`: collectors generate while the step trains."""


class SynchronousSection(Settings):
    """Steps that generate, then train."""

    read_with = "MODE=sync"

    train_while_generating: bool | Literal["auto"] = "auto"
    """Train on the first groups of a batch while the others are generated (`sync`). `auto`: where engines have GPUs or
    nodes of their own, unless a setting needs the whole batch before it trains; a dry run says which. [advanced]"""


class AsynchronousSection(Settings):
    """Collectors that generate while the step trains."""

    read_with = "MODE=async"

    max_staleness: int = Field(4, ge=0)
    """Oldest fresh group that is trained on, in policy versions (`async`)."""
    collector_in_process: bool = True
    """Run a collector in the trainer's process (`async`); off when collectors run elsewhere. [advanced]"""


class RunSection(ModelSettings, MethodSettings, ModeSection, SynchronousSection, AsynchronousSection):
    """The model, the length of the run, checkpoints and waits."""

    trust_remote_code: bool = False
    """Run code that comes with the model."""
    num_epochs: int = Field(3, ge=1)
    """Passes over the training prompts. With SOURCES each source continues in its next epoch until MAX_STEPS."""
    batch_size: int = Field(4, ge=1, le=4096)
    """Prompts a step. The default is that of SkyPilot's example, which runs on any machine; the published runs in
    recipes/ have 8 to 256."""
    max_steps: int = Field(0, ge=0)
    """Stop after this many steps even within an epoch; 0: no limit."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of everything random."""
    checkpoint_every: int = Field(25, ge=0)
    """Steps between two checkpoints; 0: at the end, and with EVAL_EVERY at each best accuracy. Even with 0 a run leaves
    its last checkpoint, three times as large as the float32 weights."""
    checkpoints_kept: int = Field(2, ge=1)
    """Newest checkpoints that are kept, besides the best one. The best has the highest greedy pass@1, a point estimate,
    on the EVAL_PROMPTS held-out prompts."""
    keep_checkpoints_every: int = Field(0, ge=0)
    """Also write a checkpoint after every multiple of this many steps, and keep it to the end, so that `grpo fork` and
    `grpo explain` find it; 0: none. Each takes as much room as the last checkpoint."""
    record_groups: RecordGroups | None = None
    """Record the groups that each step trains on, with their tokens, in the run directory: `off`, the last n steps
    (`100`), or `all`. Unset: as many of the last 1000 as a tenth of the volume's free space holds, which the preflight
    computes; `all` where MAX_STEPS fit into that tenth."""
    tracker: Literal["auto", "none", "wandb", "trackio"] = "auto"
    """Also send the metrics to a tracker, which reads its own variables: `wandb` (WANDB_PROJECT and others), `trackio`
    (TRACKIO_SPACE_ID and others; unset, its files are in SHARED_DIR/trackio). `auto`: `wandb` if WANDB_API_KEY is set.
    A resumed run continues its curve there."""
    profile_steps: Annotated[str, AfterValidator(_named_steps)] = ""
    """Profile these steps, such as `10` or `10:12`, on rank 0 and in SGLang: the directory `profile` of the run has
    traces for Perfetto, a snapshot of GPU memory, and a timeline."""


class AgentSection(AgentFunction):
    """The function that answers prompts."""

    read_with = "ROLLOUT=agent"


class ProgramSection(AgentProgram):
    """The program that answers prompts."""

    read_with = "ROLLOUT=program"


class EpisodesSection(EpisodeLimits):
    """Episodes of several turns."""

    read_with = "ROLLOUT=agent|program|environment"

    agent_concurrency: int | None = Field(None, ge=1)
    """Most episodes at once in a collector. Unset: 256 (`agent`), or the smaller of 8 per core and 1 per GiB of
    memory (`program`)."""


class EnvironmentSection(Settings):
    """The environment that is played."""

    read_with = "ROLLOUT=environment"

    opponent: str = SELF
    """The other seats of an environment that has several, such as `nim`. `self`: the policy plays all seats, and each
    is trained. `http://host:port`: the first model of that OpenAI endpoint, which asks for no key, plays them; one seat
    is trained, another one for each seed."""


class SamplingSection(AnswerSettings, AgentSection, ProgramSection, EnvironmentSection, EpisodesSection):
    """The completions of a step."""

    group_size: int = Field(8, ge=1, le=1024)
    """Completions of each prompt (G)."""
    rollout: Rollout = Rollout.COMPLETION
    """`completion`: one completion answers a prompt. `agent`: AGENT answers it in an episode of any number of turns,
    which the gateway records; MAX_NEW_TOKENS is then the longest turn. `program`: AGENT_COMMAND answers it so, or plays
    a task (DATASET=harbor:DIR) in its box. `environment`: the prompts are seeds (DATASET=seeds) or tasks (harbor:DIR),
    with which the environment-servers begin episodes."""
    over_limit_reward: float = Field(0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    """Reward of an answer over a limit: processor time or memory of the verifier, AGENT_MAX_TURNS, AGENT_MAX_TOKENS or
    AGENT_SECONDS. Such an answer is wrong; if another of its group has a lower reward, it gets that one."""

    @property
    def generation_deadline_seconds(self) -> float:
        """Longest wait for one prompt's completions once it is in flight, retries included."""
        # Settings are also checked where no request is made and the client's imports would only take time.
        from services.clients.rollout import generation_seconds

        return generation_seconds(self.max_new_tokens)

    @property
    def way(self) -> Way:
        """The way of rolling out that ROLLOUT names; with SOURCES ask the settings of a source, here and below."""
        return WAYS[self.rollout]

    @property
    def answer_tokens(self) -> int:
        """Most tokens that the model samples for one answer to a prompt."""
        return self.agent_max_tokens if self.way.has_turns else self.max_new_tokens

    @property
    def answer_seconds(self) -> float:
        """Longest time of one answer once its prompt is in flight; in an episode, calls may take AGENT_SECONDS each."""
        return 2 * self.agent_seconds if self.way.has_turns else self.generation_deadline_seconds


class RewardsSection(Settings):
    """The advantages, which come from rewards."""

    read_with = "REWARD_WEIGHT"

    dynamic_sampling_tries: int = Field(0, ge=0, le=100)
    """Replace groups without reward variance by further prompts (`async`: by further groups of the queue), at most this
    many times a step (DAPO). With ADVANTAGE=gae, reinforce, rae or a function of your own such groups teach and are
    kept."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before MAX_NEW_TOKENS over which a penalty falls from 0 to -1; 0: no penalty."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `batch_std`, `reinforce`, `reinforce_baseline`, `pass_at_k`, `maxrl` (maximum
    likelihood of right answers; rewards of 0 and 1), `gdpo` (each reward function compared by itself), `rae` (a running
    mean of each seat of a game as baseline), `gae` (PPO with a critic), or a function of your own as
    `module:function`."""
    advantage_eps: float = Field(1e-4, ge=0)
    """Added to standard deviations of rewards: 1e-4 as in TRL; verl has 1e-6. [advanced]"""
    credit: Credit = Credit.EPISODE
    """The tokens that share an advantage. `episode`: all of an episode. `turn`: those of a turn, by what the episode
    earned from that turn on, compared with the same turn of the group's other episodes; for environments, and for
    agents that give `turn_rewards`. `ADVANTAGE=gae` places rewards of turns in any case; with `turn` a step of GAMMA
    and GAE_LAMBDA is a turn."""


class ComponentsSection(Settings):
    """Reward functions that are compared one by one."""

    read_with = "ADVANTAGE=gdpo"

    gdpo_weights: str | None = None
    """Weights of the reward functions with ADVANTAGE=gdpo, as in `math=1,format=0.5`; those not named have none. Unset:
    1 for each, whatever its weight in REWARD_FN."""


class ImportanceCapSection(Settings):
    """The bound of importance weights."""

    read_with = "IMPORTANCE_CORRECTION=truncated|icepop|sequence|geometric"

    importance_cap: float | None = Field(None, gt=0)
    """Largest importance weight or ratio. Unset: 2 (`truncated`, `sequence`), 5 (`icepop`), 1.001 (`geometric`); 20 for
    `truncated` with `dppo_tv` and `dppo_kl`. [advanced]"""


class KlInRewardSection(Settings):
    """The KL to the reference as a part of the reward."""

    read_with = "KL_COEF and REWARD_WEIGHT"

    kl_in_reward: bool = False
    """Subtract the KL from rewards instead of adding it to the loss. Where advantages divide by a deviation of rewards
    (`grpo`, `batch_std`), it is subtracted from the advantages."""


class ReplaySection(Settings):
    """The groups that are replayed."""

    read_with = "REPLAY_GROUPS"

    replay_max_staleness: int = Field(8, ge=1)
    """Oldest group that is replayed, in policy versions. [advanced]"""
    replay_max_kl: float = Field(0.1, gt=0)
    """Largest KL, in nats a token, from the policy that sampled a replayed group to the present one; a group beyond it
    is left out and counted. [advanced]"""


class AlgorithmSection(RewardsSection, ComponentsSection, ImportanceCapSection, KlInRewardSection, ReplaySection):
    """Advantages, the loss, and replayed groups. Bounds that are unset are those of the loss's paper."""

    read_with = "METHOD=rl"

    mask_truncated: bool = False
    """Do not train on completions that were cut off at MAX_NEW_TOKENS; their rewards count in their group."""
    loss: str = "clipped"
    """`clipped` (PPO's surrogate), `gspo` (one ratio a completion), `cispo` (clipped weights), `sapo` (soft gate),
    `dppo_tv` and `dppo_kl` (the change of a token's probability is bounded, not that of the ratio), or a function of
    your own as `module:function`."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """Distance of the ratio's lower bound from 1. Unset: 0.2 (`clipped`), 3e-4 (`gspo`), 1 (`cispo`).
    `dppo_tv`: the largest fall of a probability (0.2); `dppo_kl`: the largest KL of a fall (0.05)."""
    clip_high: float | None = Field(None, ge=0, le=10)
    """Distance of the ratio's upper bound from 1. Unset: 0.2 (`clipped`), 4e-4 (`gspo`), 4 (`cispo`).
    `dppo_tv`: the largest rise of a probability (0.2); `dppo_kl`: the largest KL of a rise (0.05)."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of dual clip (`clipped`); unset: off. [advanced]"""
    aggregation: Aggregation | None = None
    """`token_mean`, `prompt_mean` (each prompt weighs the same), `sequence_mean` or `constant_length`. Unset:
    `sequence_mean` for `gspo` and `sapo`, else `token_mean`."""
    drop_equal_groups: bool = False
    """Leave groups whose advantages are all 0 out of the batch before UPDATES_PER_BATCH divides it, so that a step is
    not the shorter the more groups have equal rewards. Off, or with a KL loss, ENTROPY_COEF or CRITIC=shared: their
    tokens count in the mean."""
    importance_correction: ImportanceCorrection = ImportanceCorrection.TRUNCATED
    """Weight of tokens that an older policy, or an engine that rounds otherwise, sampled: `truncated`, `icepop`,
    `sequence`, `geometric` or `none`. The clip is around the policy at the start of the step, with `none` around the
    policy that sampled (docs/algorithm.md)."""
    off_policy_max_kl: float | None = Field(None, gt=0)
    """Leave out completions with negative advantage whose mean log(behaviour / policy) per token exceeds this; unset:
    off. [advanced]"""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL to the reference; 0 keeps no reference model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    replay_groups: int = Field(0, ge=0, le=4096)
    """Groups from the replay buffer that are trained on besides the fresh ones; 0: off. docs/results.md has learning
    curves with and without."""


class SharedCriticSection(Settings):
    """A critic on the policy."""

    read_with = "CRITIC=shared"

    value_coef: float = Field(0.1, gt=0)
    """Weight of the value loss in the sum with the policy's (`shared`). [advanced]"""


class CriticSection(SharedCriticSection):
    """The critic of ADVANTAGE=gae: PPO with generalized advantage estimation. Other advantages have none."""

    read_with = "ADVANTAGE=gae"

    critic: CriticModel = CriticModel.OWN
    """`own`: a second model, which starts as MODEL_NAME and is trained whole, with an optimizer of its own. `shared`: a
    value head on the policy's model, which costs hardly any memory; its loss is added to the policy's."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a step. [advanced]"""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Weight of longer estimates: 1 is the whole completion's return less the value (no bias), 0 one step (least
    variance)."""
    value_clip: float = Field(0.2, ge=0)
    """Largest move of a value in a training step, in units of reward; 0: no bound. It acts from the second update of a
    batch on. 0.2 as in PPO's first code (arXiv:2005.12729). [advanced]"""
    critic_learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic; of its head alone with `shared`. Schedule and warm-up are the policy's."""
    critic_warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic is trained (with `shared`, its head) and the policy stays."""


class TeacherSection(Settings):
    """A teacher, of either kind."""

    read_with = "TEACHER_MODEL|TEACHER_URL"

    teacher_coef: float = Field(1.0, gt=0)
    """Weight of the distance from the teacher."""


class LocalTeacherSection(Settings):
    """A teacher in the trainer."""

    read_with = "TEACHER_MODEL"

    teacher_jsd_beta: float | None = Field(None, ge=0, le=1)
    """Unset: the reverse KL at the sampled tokens, whose teacher values are stored with each group. A number: the
    generalised Jensen-Shannon divergence over the whole vocabulary, from 0 (forward KL) to 1 (reverse KL), which takes
    two more forward passes of TEACHER_MODEL a step."""


class DistillationSection(RewardWeightSettings, TeacherSection, LocalTeacherSection):
    """On-policy distillation: the policy learns from the probabilities that a teacher gives to the policy's own tokens.

    The distance from the teacher is a term of its own beside the policy loss. With SOURCES each source may have
    another teacher, or none.
    """

    read_with = "METHOD=rl"

    teacher_model: str = ""
    """The teacher as a frozen model in the trainer, sharded as the policy is: a Hugging Face name or a directory of any
    supported architecture, with the policy's tokenizer."""
    teacher_url: str = Field("", pattern=r"^(https?://.*)?$")
    """The teacher behind an endpoint that scores token ids: an SGLang server, or this project's engine, as
    `http://host:port`, which asks for no key. It computes at temperature 1, so TEMPERATURE must be 1."""


class AdaptersSection(Settings):
    """LoRA adapters."""

    read_with = "LORA_RANK"

    lora_alpha: float = Field(32.0, gt=0)
    """LoRA's scale is this divided by the rank: 4 with rank 8, 1 with rank 32."""


class OptimisationSection(AdaptersSection):
    """The optimizer, AdamW, and what it trains."""

    updates_per_batch: int = Field(1, ge=1, le=64)
    """Optimizer steps in a pass over a batch; each takes an equal share of its groups."""
    epochs_per_batch: int = Field(1, ge=1, le=64)
    """Passes over a batch, for policy and critic (PPO's epochs). The clip is around the policy before the first."""
    learning_rate: float = Field(default_factory=lambda values: 3e-5 if values.get("lora_rank") else 1e-6, gt=0)
    """Peak learning rate of AdamW. Unset: 1e-6, and with LORA_RANK 3e-5. Published runs that train the whole model have
    1e-6 to 6e-6 (recipes/); adapters need 10 to 30 times as much."""
    lr_schedule: Schedule = Schedule.CONSTANT
    """`constant`, `linear` or `cosine`. The latter fall to 0 with the last step. If groups that are left out use up the
    prompts sooner, as with DYNAMIC_SAMPLING_TRIES, they fall with the prompts that are left."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW's second beta; the first is 0.9. The default is a memory of 100 steps, because many runs have hardly more;
    torch, TRL and verl have 0.999."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the root of the second moment. A larger one damps parameters with tiny gradients.
    [advanced]"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, on matrices and not on norms and biases."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""


class MemorySection(MemorySettings):
    """Number formats, and what trades memory for time."""

    compute_type: ComputeType = ComputeType.AUTO
    """The type of numbers of forward and backward passes: `float32`, `bfloat16` or `auto`. `auto` is bfloat16 on a GPU
    and on processors with bfloat16 instructions (AVX512-BF16 or AMX), float32 on other processors and with
    PUBLISH_TYPE=float32. Master weights are always float32."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Tokens in one forward and backward pass of a rank, which also bound the padding inside attention. Unset on GPUs:
    half of them, if that saves `ACTIVATION_CHECKPOINTING=auto` from recomputing whole layers."""
    attention_kernel: Literal["triton", "flash"] = "triton"
    """The kernel of attention on GPUs. `flash` is FlashAttention 4, of the package flash-attn-4, on an H100 or newer,
    for models without windows, caps or sinks. No GPU has run it here yet. [advanced]"""
    activation_checkpointing: Checkpointing | Literal["auto"] = "auto"
    """Recompute layers in the backward pass: `true`, `false`, or on GPUs `selective`: the parts that the compiler finds
    cheap, such as attention, which at least halves the memory for activations. `auto`: the fastest that a GPU's memory
    allows; `false` on a CPU."""
    shard_parameters: bool | Literal["auto"] = "auto"
    """`true`: free gathered parameters between forward and backward and reduce gradients every micro-batch (least
    memory). `false`: gather and reduce once a step (least traffic). `auto`: what a GPU's memory allows; `true` on a
    CPU."""
    cpu_offload: bool | Literal["auto"] = "auto"
    """`true`: on GPUs, keep the state (master weights, gradients, AdamW's moments, frozen models) in host memory, take
    optimizer steps there, and copy each layer to the GPU when it computes. `auto`: only if nothing else fits, and never
    with LORA_RANK, whose state is small. It needs 16 bytes of host memory a parameter."""
    layout: Layout = Layout.AUTO
    """`tree`: tokens that completions of a prompt share are computed once, in the trainer's own attention. `rows`: each
    completion is a row with its prompt, padded on the right, in the model's own forward pass. `auto`: trees for
    families whose layers the trainer knows (docs/models.md), otherwise rows."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that compute each micro-batch together, an equal part of its tokens each, so that a sequence may be longer
    than one GPU holds; 1: off. MICRO_BATCH_TOKENS is then the part of one rank. It must divide the number of ranks and
    of the model's attention heads, and divide the number of its key-value heads or be a multiple of that. Models with
    recurrent layers need 1."""


class PublishingSection(Settings):
    """The transfer of new weights to the rollout workers."""

    publish_transport: Transport = Transport.DISK
    """`disk`: through the shared volume. `broadcast`: to the workers over NCCL or gloo; LoRA adapters are read from the
    volume all the same. `local`: in memory that the trainer shares with engines on its host; whole weights only."""
    publish_type: PublishedType = PublishedType.BFLOAT16
    """`bfloat16` or `float32`, of whole weights or of LoRA adapters. Whole weights are rounded to bfloat16 up or down,
    with the chance that makes their mean exact, and the trainer computes with the rounded weights, too
    (docs/algorithm.md)."""
    publish_in_place: bool | None = None
    """Change weights under generations in flight, which continue with the new ones; each token's version is recorded.
    Off: they end first. Unset: on with `MODE=async`, where engines always generate, and off with `MODE=sync`.
    [advanced]"""
    min_workers: int = Field(1, ge=1)
    """The run stops when fewer rollout workers are left."""


class TargetSection(Settings):
    """The accuracy at which a run ends."""

    read_with = "EVAL_PROMPTS and EVAL_EVERY"

    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Stop early when greedy pass@1 on the EVAL_PROMPTS held-out prompts is at least this. The point estimate is
    compared, without regard to its standard error."""


class EvaluationSection(TargetSection):
    """Evaluation on held-out prompts."""

    eval_every: int = Field(0, ge=0)
    """Steps between two evaluations; 0: at the start and end only."""
    eval_prompts: int = Field(128, ge=0)
    """Held-out prompts of an evaluation (n), of each source with SOURCES; 0: no evaluation. The standard error of
    accuracy p is sqrt(p(1-p)/n): at most 0.045 for 128."""
    eval_samples: int = Field(0, ge=0)
    """Completions sampled of each held-out prompt for avg@k and pass@k; 0: off."""
