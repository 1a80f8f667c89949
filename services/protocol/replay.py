"""The types of the replay-buffer's requests and replies."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.protocol.base import Count, Finite, Priority, Seed, StrictModel, WireModel
from services.protocol.groups import Group, GroupFormatError, joined, split, unpack_sequences

GROUPS_TYPE = "application/octet-stream"
"""The media type of ``framed`` bytes. The routes with groups take them or JSON, and return the type
that a request accepts."""


def framed(fields: Mapping[str, Any], groups: Iterable[bytes]) -> bytes:
    """Return a message with packed groups as bytes: its other fields as JSON, then the groups."""
    return joined([orjson.dumps(fields), *groups])


def unframed(data: bytes) -> dict[str, Any]:
    """Return the fields of ``framed`` bytes, the groups among them, of which only the checksums are checked.

    Raises:
        GroupFormatError: another version of this program wrote them, or they are damaged.
    """
    try:
        head, *parts = split(data)
        fields: dict[str, Any] = orjson.loads(head)
        unpacked = [header | {"sequences": sequences} for header, sequences in map(unpack_sequences, parts)]
        draws = fields.pop("draws", None)
        groups = unpacked if draws is None else [{"group": g, **draw} for g, draw in zip(unpacked, draws, strict=True)]
        return fields | {"groups": groups}
    except GroupFormatError:
        raise
    # A message of another program may raise any of these.
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GroupFormatError(f"not a message with groups: {error}") from error


class AddGroupsRequest(StrictModel):
    """Body of POST /groups and POST /queue. Adding a group id twice changes nothing."""

    groups: list[Group] = Field(max_length=4096)
    priorities: list[Priority] | None = None

    @model_validator(mode="after")
    def _one_priority_a_group(self) -> Self:
        if self.priorities is not None and len(self.priorities) != len(self.groups):
            raise ValueError(f"{len(self.groups)} groups, {len(self.priorities)} priorities: give one a group or none")
        return self


class AddGroupsReply(WireModel):
    """Reply of POST /groups and POST /queue: new groups, groups whose id was known already, and all groups now."""

    added: int
    duplicates: int
    size: int


class SampleGroupsRequest(StrictModel):
    """Body of POST /groups/sample: draws groups without replacement, fewer than asked for if fewer qualify.

    ``exponent`` is alpha of prioritised experience replay (Schaul et al. 2016, arXiv:1511.05952, eq. 1): a group's
    probability p is proportional to priority ** alpha, so that 0 draws uniformly. ``correction`` is its beta (section
    3.4): the weights are (N p) ** -beta, divided by their expected value over the buffer. The same seed draws the same
    groups from the same contents. With a ``source`` the buffer of all this is the groups of that source.
    """

    batch_size: int = Field(ge=1, le=4096)
    exponent: float = Field(default=1.0, ge=0, le=10)
    correction: float = Field(default=0.0, ge=0, le=1)
    min_policy_version: Count = 0
    exclude: list[str] = Field(default_factory=list, max_length=65_536)
    seed: Seed | None = None
    source: str = ""


class SampledGroup(WireModel):
    """A drawn group with its probability and its importance weight."""

    group: Group
    priority: float
    probability: float
    weight: float


class SampleGroupsReply(WireModel):
    """Reply of POST /groups/sample."""

    groups: list[SampledGroup]


class UpdatePrioritiesRequest(StrictModel):
    """Body of POST /groups/priorities: new priorities by group id; unknown ids are counted, not refused."""

    priorities: dict[str, Priority] = Field(max_length=65_536)


class UpdatePrioritiesReply(WireModel):
    """Reply of POST /groups/priorities: the numbers of updated and of unknown ids."""

    updated: int
    unknown: int


# --- the fresh queue --------------------------------------------------------------------------------------------------


class LeaseRequest(StrictModel):
    """Body of POST /queue/lease: takes up to ``max_groups``, the oldest first.

    The server waits up to ``wait_seconds`` for ``min_groups``. It drops and counts groups older than
    ``min_policy_version``. If the lease is not acknowledged within ``lease_seconds``, its groups return to the front of
    the queue. A repeated ``request_id`` gets the same lease again, so that a lost reply loses no groups. With a
    ``source`` only groups of that source are taken, dropped and waited for. A consumer that ``starts`` ends the leases
    of an earlier process of its name, which can acknowledge none any more.
    """

    max_groups: int = Field(ge=1, le=4096)
    min_groups: int = Field(default=1, ge=1, le=4096)
    min_policy_version: Count = 0
    lease_seconds: float = Field(default=600, gt=0, le=86_400)
    wait_seconds: float = Field(default=0, ge=0, le=60)
    consumer: str = Field(default="trainer", max_length=200)
    request_id: str | None = Field(default=None, min_length=1, max_length=200)
    source: str = ""
    starts: bool = False


class LeaseReply(WireModel):
    """Reply of POST /queue/lease; ``lease_id`` is None without groups. ``dropped_stale`` groups were too old."""

    lease_id: str | None
    groups: list[Group]
    dropped_stale: int = 0
    waiting: int = 0


class AcknowledgeRequest(StrictModel):
    """Body of POST /queue/acknowledge: reports that a lease's groups were trained on.

    ``keep`` moves the groups into the replay store.
    """

    lease_id: str
    keep: bool = True


class AcknowledgeReply(WireModel):
    """Reply of POST /queue/acknowledge: the number of groups that left the queue, 0 for a repeated request.

    ``lost`` counts groups that another consumer has leased since this lease expired.
    """

    acknowledged: int
    lost: int = 0


class AdmissionRequest(StrictModel):
    """Body of POST /queue/admission: a collector says how many prompts it has in flight, and asks for ``most`` more.

    The server waits up to ``wait_seconds`` until there is room for one. There is room while fewer than ``bound`` groups
    (unset: ``batch_size`` times ``max_staleness``) wait or are in flight at any collector; or while fewer than a batch
    do, or are on lease. A ``source`` has room of its own: only its groups count, and a batch is its part of one.
    """

    collector: str = Field(min_length=1, max_length=200)
    in_flight: Count
    most: int = Field(ge=0, le=4096)
    batch_size: int = Field(ge=1)
    max_staleness: int = Field(ge=0)
    bound: Count | None = None
    source: str = ""
    wait_seconds: float = Field(default=0, ge=0, le=60)


class AdmissionReply(WireModel):
    """Reply of POST /queue/admission: the number of prompts that the collector may take, 0 if there was no room."""

    places: int


class SnapshotRequest(StrictModel):
    """Body of POST /snapshots and POST /snapshots/restore: the label of the store's contents and priorities."""

    label: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")


class SnapshotReply(WireModel):
    """Reply of the snapshot routes: the label and the number of its groups."""

    label: str
    groups: int


class ReplayStats(BaseModel):
    """Reply of the replay-buffer's GET /stats.

    ``size`` counts the groups of /groups/sample plus the experiences without tokens of /sample;
    ``newest_policy_version`` is the newest of those groups'.
    """

    model_config = ConfigDict(extra="allow")

    size: int
    capacity: int
    groups: int
    experiences: int
    waiting: int
    leased: int
    newest_policy_version: int | None
    in_flight: dict[str, int] = {}
    """Prompts in flight by collector."""


# --- routes for clients of SkyPilot's own example --------------------------------------------------------------------


class FlatExperience(BaseModel):
    """An experience without tokens, as clients of SkyPilot's own example send it. Other fields are kept as they are."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str
    response: str
    reward: Finite
    ground_truth: str = ""


class AddExperiencesRequest(WireModel):
    """Body of POST /add."""

    experiences: list[FlatExperience] = Field(max_length=65_536)


class AddExperiencesReply(WireModel):
    """Reply of POST /add; ``size`` is the number of experiences now."""

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
