"""What crosses the wire to and from the replay-buffer."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.protocol.base import Count, Finite, Priority, Seed, StrictModel, WireModel
from services.protocol.groups import Group


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
    maximum in the batch. The same seed draws the same groups from the same contents.
    """

    batch_size: int = Field(ge=1, le=4096)
    strategy: SampleStrategy = SampleStrategy.PRIORITY
    exponent: float = Field(default=1.0, ge=0, le=10)
    correction: float = Field(default=0.0, ge=0, le=1)
    min_policy_version: Count = 0
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


# --- the fresh queue --------------------------------------------------------------------------------------------------


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


class SnapshotRequest(StrictModel):
    """Body of POST /snapshots and POST /snapshots/restore: the store's contents and priorities under a label."""

    label: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")


class SnapshotReply(WireModel):
    """The label and how many groups it holds."""

    label: str
    groups: int


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


# --- routes that clients of the stock SkyPilot example use ------------------------------------------------------------


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
