"""Every type that crosses the wire between the components of the job group.

The unit is the *group*: one prompt with its G completions. It travels, is stored, is sampled and is dropped as one
record. Token ids are the truth; text is for people. A reward of None means "could not be scored" and is never 0.

Models refuse unknown fields only where a misspelling would change a result; records which come from older or other
clients may carry more than we read.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# A policy version, an epoch, a position, a number of tokens: bounded so that every store and array can hold it.
Count = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Bounded so that no exponent within bounds makes it infinite.
Priority = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]

MAX_GROUP_SIZE = 1024
MAX_TOKENS = 1_048_576


class WireModel(BaseModel):
    """A record that crosses the wire. NaN and infinity are refused wherever a number is expected."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)


class StrictModel(WireModel):
    """A request in which an unknown field is an error, since a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid")


# --- data-server -----------------------------------------------------------------------------------------------------


class Message(WireModel):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


class Prompt(WireModel):
    """One prompt with its ground truth.

    ``prompt`` is the text of the user's turn, ``prompt_ids`` the whole prompt as the model sees it: the chat template
    applied and tokenised, generation marker included. ``epoch`` and ``position`` say where in the shuffled order the
    prompt stood, so that a consumer can account for each prompt once per epoch.
    """

    id: str
    prompt: str
    ground_truth: str
    prompt_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKENS)
    messages: list[Message] = Field(default_factory=list)
    category: str | None = None
    epoch: Count = 0
    position: Count = 0


class Split(StrEnum):
    """Prompts to train on, and prompts held out of training."""

    TRAIN = "train"
    TEST = "test"


class Cursor(WireModel):
    """Where a consumer stands: positions below ``position`` of ``epoch``, and those in ``skip``, are used."""

    epoch: Count = 0
    position: Count = 0
    skip: list[Count] = Field(default_factory=list, max_length=1_000_000)


class Shard(StrictModel):
    """With ``shard_count`` > 1, only prompts of shard ``shard_index`` come; shards are disjoint and together all."""

    shard_index: Count = 0
    shard_count: int = Field(default=1, ge=1, le=65_536)

    @model_validator(mode="after")
    def _shard_exists(self) -> Self:
        if self.shard_index >= self.shard_count:
            raise ValueError(f"shard_index {self.shard_index} must be below shard_count {self.shard_count}")
        return self


class PromptsQuery(Shard):
    """Query of GET /prompts. With ``epoch`` or ``position`` given, the server's own cursors are left alone."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    split: Split = Split.TRAIN
    consumer: str = Field(default="default", min_length=1, max_length=200)
    epoch: Count | None = None
    position: Count | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=200)


class PromptsRequest(Shard):
    """Body of POST /prompts: the prompts at and after a cursor, which depends on nothing that the server remembers."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    split: Split = Split.TRAIN
    cursor: Cursor = Field(default_factory=Cursor)


class CursorRequest(StrictModel):
    """Body of PUT /cursor: sets where the server's own cursor of a consumer stands."""

    consumer: str = Field(default="default", min_length=1, max_length=200)
    split: Split = Split.TRAIN
    cursor: Cursor


class SuccessRatesRequest(StrictModel):
    """Body of POST /success_rates: share of right completions by prompt id; unknown ids are counted, not an error."""

    success_rates: dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]] = Field(max_length=65_536)


class SuccessRatesReply(WireModel):
    """How many ids were known and recorded, and how many were not."""

    recorded: int
    unknown: int


class PromptBatch(WireModel):
    """Reply of GET /prompts. ``cursor`` is what to pass for the batch after this one."""

    prompts: list[Prompt]
    cursor: Cursor
    total_available: int = Field(ge=0)


# --- experiences and groups ------------------------------------------------------------------------------------------


class FinishReason(StrEnum):
    """Why a completion ended: an end token, the length limit, or an abort from outside (its tokens are partial)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(WireModel):
    """Completion tokens ``start`` (inclusive) to ``end`` (exclusive) were sampled from policy ``version``."""

    version: Count
    start: Count
    end: Count


class Completion(WireModel):
    """One completion as the engine gave it.

    ``completion_ids`` and ``logprobs`` have one entry a token, the end token included. Logprobs are those of the
    behaviour policy: the temperature-scaled distribution before any top-p or top-k cut.
    """

    completion: str = ""
    completion_ids: list[TokenId] = Field(max_length=MAX_TOKENS)
    logprobs: list[Finite] = Field(max_length=MAX_TOKENS)
    policy_versions: list[VersionSpan]
    finish_reason: FinishReason

    @field_validator("logprobs")
    @classmethod
    def _logprobs_are_not_positive(cls, logprobs: list[float]) -> list[float]:
        # A few ulps above zero occur in bf16 engines; more is not a log-probability.
        if logprobs and max(logprobs) > 1e-3:
            raise ValueError(f"logprobs must be <= 0, got {max(logprobs)}")
        return logprobs

    @model_validator(mode="after")
    def _one_entry_per_token(self) -> Self:
        n = len(self.completion_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"{n} completion_ids but {len(self.logprobs)} logprobs: one logprob a token is needed")
        position = 0
        for span in self.policy_versions:
            if span.start != position or span.end < span.start:
                raise ValueError(f"policy_versions must cover the completion without gaps, broken at token {position}")
            position = span.end
        if position != n:
            raise ValueError(f"policy_versions cover {position} of {n} tokens")
        return self

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of this completion."""
        return min(span.version for span in self.policy_versions)


class RewardStatus(StrEnum):
    """How scoring ended. Every status but ``scored`` leaves the reward None."""

    SCORED = "scored"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    ERROR = "error"
    OVERLOADED = "overloaded"


class RewardResult(WireModel):
    """What the verifier said of one answer; ``reward`` is None exactly when ``status`` is not ``scored``.

    ``components`` has the value of each reward function by name, ``extracted`` the answer that was read from the
    response, ``reason`` why it could not be scored or how it was judged.
    """

    reward: Finite | None
    status: RewardStatus = RewardStatus.SCORED
    components: dict[str, Finite | None] = Field(default_factory=dict)
    extracted: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _reward_matches_status(self) -> Self:
        if (self.reward is None) == (self.status is RewardStatus.SCORED):
            raise ValueError(f"reward {self.reward} does not fit status {self.status.value}")
        return self


class Experience(Completion):
    """A scored completion."""

    result: RewardResult

    @property
    def reward(self) -> float | None:
        """The reward, or None where the completion could not be scored."""
        return self.result.reward


class Group(WireModel):
    """One prompt with its G scored completions."""

    group_id: str = Field(min_length=1, max_length=200)
    prompt_id: str = ""
    prompt: str
    ground_truth: str
    prompt_ids: list[TokenId] = Field(min_length=1, max_length=MAX_TOKENS)
    experiences: list[Experience] = Field(min_length=1, max_length=MAX_GROUP_SIZE)
    epoch: Count = 0
    position: Count = 0

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled any token of the group; staleness is counted from it."""
        return min(experience.oldest_version for experience in self.experiences)

    @property
    def rewards(self) -> list[float]:
        """One reward a completion, NaN where it could not be scored."""
        return [math.nan if e.reward is None else e.reward for e in self.experiences]


# --- reward-server ---------------------------------------------------------------------------------------------------


class RewardItem(WireModel):
    """One answer to score. The last two are known to trainers and let length-dependent rewards work in tokens."""

    prompt: str
    response: str
    ground_truth: str
    completion_tokens: Count | None = None
    finish_reason: FinishReason | None = None


class BatchRewardRequest(WireModel):
    """Body of POST /batch_reward."""

    items: list[RewardItem] = Field(max_length=65_536)


class BatchRewardReply(WireModel):
    """Reply of POST /batch_reward: one result an item, in order."""

    rewards: list[RewardResult]


# --- replay-buffer: groups -------------------------------------------------------------------------------------------


class AddGroupsRequest(StrictModel):
    """Body of POST /groups and POST /queue. Adding a group id twice changes nothing."""

    groups: list[Group] = Field(max_length=4096)
    priorities: list[Priority] | None = None

    @model_validator(mode="after")
    def _one_priority_a_group(self) -> Self:
        if self.priorities is not None and len(self.priorities) != len(self.groups):
            raise ValueError(
                f"{len(self.groups)} groups but {len(self.priorities)} priorities: give one a group or none"
            )
        return self


class AddGroupsReply(WireModel):
    """``added`` new groups, ``duplicates`` whose id was known already; ``size`` groups afterwards."""

    added: int
    duplicates: int
    size: int


class SampleStrategy(StrEnum):
    """How groups are drawn: by priority, the newest first, or all alike."""

    PRIORITY = "priority"
    RECENCY = "recency"
    UNIFORM = "uniform"


class SampleGroupsRequest(StrictModel):
    """Body of POST /groups/sample. Draws without replacement; fewer come back when fewer qualify.

    ``exponent`` is alpha of prioritised experience replay (Schaul et al. 2016, arXiv:1511.05952, eq. 1): the chance is
    proportional to priority ** alpha. ``correction`` is its beta (section 3.4): weights are (N p) ** -beta over their
    maximum in the batch. ``policy_version`` is the trainer's current one: groups that it makes too stale to keep are
    evicted first. The same seed draws the same groups from the same contents.
    """

    batch_size: int = Field(ge=1, le=4096)
    strategy: SampleStrategy = SampleStrategy.PRIORITY
    exponent: float = Field(default=1.0, ge=0, le=10)
    correction: float = Field(default=0.0, ge=0, le=1)
    min_policy_version: Count = 0
    policy_version: Count | None = None
    exclude: list[str] = Field(default_factory=list, max_length=65_536)
    seed: Seed | None = None


class SampledGroup(WireModel):
    """A group with the chance at which it was drawn and its importance weight."""

    group: Group
    priority: float
    probability: float
    weight: float


class SampleGroupsReply(WireModel):
    """Reply of POST /groups/sample."""

    groups: list[SampledGroup]


class UpdatePrioritiesRequest(StrictModel):
    """Body of POST /groups/priorities: new priorities by group id; unknown ids are counted, not an error."""

    priorities: dict[str, Priority] = Field(max_length=65_536)


class UpdatePrioritiesReply(WireModel):
    """How many ids were known and set, and how many were not."""

    updated: int
    unknown: int


# --- replay-buffer: the fresh queue ----------------------------------------------------------------------------------


class LeaseRequest(StrictModel):
    """Body of POST /queue/lease: up to ``max_groups``, oldest first; waits ``wait_seconds`` at most for ``min_groups``.

    Groups older than ``min_policy_version`` are dropped and counted. A lease that is not acknowledged within
    ``lease_seconds`` returns its groups to the front of the queue. Repeating a request with its ``request_id`` gives
    the lease it was given before, so that a lost reply loses nothing.
    """

    max_groups: int = Field(ge=1, le=4096)
    min_groups: int = Field(default=1, ge=1, le=4096)
    min_policy_version: Count = 0
    lease_seconds: float = Field(default=600, gt=0, le=86_400)
    wait_seconds: float = Field(default=0, ge=0, le=60)
    consumer: str = Field(default="trainer", max_length=200)
    request_id: str | None = Field(default=None, min_length=1, max_length=200)


class LeaseReply(WireModel):
    """The leased groups; ``lease_id`` is None when there are none. ``dropped_stale`` were too old and are gone."""

    lease_id: str | None
    groups: list[Group]
    dropped_stale: int = 0
    waiting: int = 0


class AcknowledgeRequest(StrictModel):
    """Body of POST /queue/acknowledge: these groups were trained on. ``keep`` moves them into the replay store."""

    lease_id: str
    keep: bool = True


class AcknowledgeReply(WireModel):
    """How many groups were taken off the queue; 0 for a lease already acknowledged.

    ``lost`` are groups of a lease that expired and which another consumer has leased since: they are the other's now.
    """

    acknowledged: int
    lost: int = 0


class ReleaseRequest(StrictModel):
    """Body of POST /queue/release: gives a lease's groups back to the front of the queue."""

    lease_id: str


class ReleaseReply(WireModel):
    """How many groups went back; 0 for a lease already ended."""

    released: int


class SnapshotRequest(StrictModel):
    """Body of POST /snapshots and POST /snapshots/restore: the store's contents and priorities under a label."""

    label: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")


class SnapshotReply(WireModel):
    """The label and how many groups it holds."""

    label: str
    groups: int


# --- replay-buffer: routes that clients of the stock SkyPilot example use ---------------------------------------------


class FlatExperience(BaseModel):
    """One experience without tokens, as clients of the stock example send it. Other fields are kept as they are."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str
    response: str
    reward: Finite
    ground_truth: str = ""


class AddExperiencesRequest(WireModel):
    """Body of POST /add."""

    experiences: list[FlatExperience] = Field(max_length=65_536)


class AddExperiencesReply(WireModel):
    """Reply of POST /add: ``size`` experiences afterwards."""

    added: int
    size: int


class SampleExperiencesRequest(WireModel):
    """Body of POST /sample."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    prioritized: bool = True
    seed: Seed | None = None


class SampleExperiencesReply(WireModel):
    """Reply of POST /sample."""

    experiences: list[dict[str, Any]]


class ReplayStats(BaseModel):
    """Reply of the replay-buffer's GET /stats.

    ``size`` counts what /groups/sample and /sample draw from: groups plus experiences without tokens.
    """

    model_config = ConfigDict(extra="allow")

    size: int
    capacity: int
    groups: int
    experiences: int
    waiting: int
    leased: int
    newest_policy_version: int | None


class DataStats(BaseModel):
    """Reply of the data-server's GET /stats: prompts by split, rows refused by reason, and where consumers stand."""

    model_config = ConfigDict(extra="allow")

    source: str
    train_prompts: int
    test_prompts: int
    refused: dict[str, int]


# --- all services ----------------------------------------------------------------------------------------------------


class Health(BaseModel):
    """Reply of GET /health; HTTP 503 while ``status`` is not ``healthy``."""

    model_config = ConfigDict(extra="allow")

    status: Literal["healthy", "starting", "draining", "unhealthy"]
    service: str


class Problem(BaseModel):
    """An RFC 9457 problem document: what, where, and what to do."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None
