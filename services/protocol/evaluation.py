"""What crosses the wire between evaluation head, environment servers and the head's page.

An *episode* is one play of an environment from reset to end. A *state* is what the environment shows: numbers (a
number or nested lists of one shape) or the messages of a conversation. An *action* is what a policy answers: an index,
numbers, or the text of a completion.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, model_validator

from services.protocol import Count, Finite, Seed, StrictModel, WireModel

# Their contents are checked by the policy or the environment that gets them, which knows what they should be.
State = StrictFloat | list[Any]
Action = StrictInt | StrictFloat | str | list[Any]

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/@-]*$")]
EpisodeId = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._:-]+$")]

MAX_STATES = 4096
"""States in one request."""


class StateKind(StrEnum):
    """What states are made of."""

    NUMBERS = "numbers"
    MESSAGES = "messages"


class ActionKind(StrEnum):
    """What actions are."""

    INDEX = "index"
    INDICES = "indices"
    NUMBERS = "numbers"
    TEXT = "text"


class StateSpec(WireModel):
    """What the states of a policy or environment are; ``shape`` is that of numbers."""

    kind: StateKind
    shape: list[Count] = Field(default_factory=list, max_length=8)


class ActionSpec(WireModel):
    """What the actions of a policy or environment are.

    ``shape`` is that of numbers and indices, ``count`` says how many indices there are from ``start`` on.
    """

    kind: ActionKind
    shape: list[Count] = Field(default_factory=list, max_length=8)
    count: Count | None = None
    start: int = 0


# --- evaluation head: /evaluate --------------------------------------------------------------------------------------


class EpisodePosition(StrictModel):
    """Which episode a state is of, after how many of its actions, and the sum of its rewards so far."""

    episode: EpisodeId
    step: Count = 0
    episode_return: Finite = 0.0


class FinishedEpisode(StrictModel):
    """An episode that has ended: ``steps`` actions were taken and ``episode_return`` is the sum of rewards."""

    episode: EpisodeId
    steps: Count
    episode_return: Finite
    seed: Seed | None = None


class EvaluateRequest(StrictModel):
    """Body of POST /evaluate: one ``state``, or many ``states``, to which the policy is to answer with actions.

    ``server`` is the name under which the head accounts for it. A server that also sends an ``instance_key``, a secret
    of its own making, keeps that name for itself. ``episodes`` has one entry a state; ``finished`` reports episodes
    that have ended, each counted once however often it is reported. A request may consist of reports alone.
    """

    policy: Name | None = None
    server: Name = "anonymous"
    instance_key: Annotated[str, Field(min_length=16, max_length=100)] | None = None
    environment: Name | None = None
    state: State | None = None
    states: list[State] | None = Field(default=None, max_length=MAX_STATES)
    episodes: list[EpisodePosition] | None = Field(default=None, max_length=MAX_STATES)
    finished: list[FinishedEpisode] = Field(default_factory=list, max_length=MAX_STATES)

    @model_validator(mode="after")
    def _states_and_episodes_agree(self) -> Self:
        if self.state is not None and self.states is not None:
            raise ValueError("give either state or states, not both")
        count = len(self.all_states)
        if not count and not self.finished:
            raise ValueError("give state, states, or finished episodes to report")
        if self.episodes is not None and len(self.episodes) != count:
            raise ValueError(f"{count} states but {len(self.episodes)} episodes: give one a state or none")
        return self

    @property
    def all_states(self) -> list[State]:
        """The states in order, whichever way they were given."""
        return self.states or [] if self.state is None else [self.state]


class EvaluateReply(WireModel):
    """Reply of POST /evaluate: one action a state, in order; ``action`` is the first, where one state was given.

    ``policy_versions`` has the version that chose each action: a policy may be reloaded between two batches.
    """

    policy: str
    policy_versions: list[int | None]
    actions: list[Action]
    action: Action | None = None


# --- evaluation head: what it knows and shows ------------------------------------------------------------------------


class ServerState(StrEnum):
    """How the head finds a server."""

    CONNECTED = "connected"
    STARTING = "starting"
    UNREACHABLE = "unreachable"
    SILENT = "silent"


class ServerMode(StrEnum):
    """Who plays: the head asks for states (``driven``), or the server asks for actions (``pushing``)."""

    DRIVEN = "driven"
    PUSHING = "pushing"
    IDLE = "idle"


class DiscoveredServer(WireModel):
    """A server that discovery found: ``source`` is ``cluster``, ``service`` or ``address``."""

    name: str
    source: Literal["cluster", "service", "address"]
    status: str
    url: str | None = None


class DiscoveryReply(WireModel):
    """Reply of GET /discovered and POST /discover.

    ``errors`` says which source could not be asked; the servers that it gave before are then kept.
    """

    enabled: bool
    prefix: str | None
    servers: list[DiscoveredServer]
    errors: dict[str, str] = Field(default_factory=dict)
    age_seconds: float | None = None


# --- environment server ----------------------------------------------------------------------------------------------


class EnvironmentInfo(WireModel):
    """An environment and what its states and actions are."""

    id: str
    state: StateSpec
    action: ActionSpec
    max_steps: int


class EnvironmentServerHealth(WireModel):
    """What GET /health of an environment server says beside the status, and the head reads.

    ``instance`` is the fingerprint of the server's ``instance_key``, new with each start.
    """

    name: Name
    instance: str = Field(min_length=1, max_length=64)
    environment: str = Field(min_length=1, max_length=100)
    pushing: bool
    max_episodes: int


def fingerprint(instance_key: str) -> str:
    """Return the public form of a server's ``instance_key``: it identifies the server but gives no access."""
    return hashlib.sha256(instance_key.encode()).hexdigest()[:16]


class ResetRequest(StrictModel):
    """Body of POST /reset: begins ``episodes`` episodes of an environment, by default of the server's own.

    The i-th has seed ``seed`` + i; the same seed begins the same episode. ``request_id`` makes a repeated request give
    the same episodes again.
    """

    environment: str | None = Field(default=None, min_length=1, max_length=100)
    episodes: int = Field(default=1, ge=1, le=1024)
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=100)


class EpisodeStart(WireModel):
    """An episode that has begun, and its first state."""

    episode: str
    seed: int
    state: State


class ResetReply(WireModel):
    """Reply of POST /reset."""

    environment: EnvironmentInfo
    episodes: list[EpisodeStart]


class StepItem(StrictModel):
    """The action to take in an episode after ``step`` others; repeating a step gives the same result again."""

    episode: EpisodeId
    step: Count
    action: Action


class StepRequest(StrictModel):
    """Body of POST /step: at most one action an episode."""

    steps: list[StepItem] = Field(min_length=1, max_length=MAX_STATES)

    @model_validator(mode="after")
    def _one_action_an_episode(self) -> Self:
        if len({item.episode for item in self.steps}) < len(self.steps):
            raise ValueError("an episode occurs twice; send one action an episode at a time")
        return self


class StepStatus(StrEnum):
    """Where an episode stands after an action.

    ``terminated`` and ``truncated`` are gymnasium's; ``refused`` leaves the episode as it was, since the action does
    not fit; a ``lost`` episode is unknown here (the server was restarted, or it was idle for too long) or broke.
    """

    RUNNING = "running"
    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    LOST = "lost"


class StepResult(WireModel):
    """What an action led to; ``state`` is None after ``refused`` and ``lost``, where ``detail`` says why."""

    episode: str
    status: StepStatus
    state: State | None = None
    reward: float = 0.0
    steps: int = 0
    episode_return: float = 0.0
    detail: str | None = None


class StepReply(WireModel):
    """Reply of POST /step: one result an item, in order."""

    results: list[StepResult]


class CloseRequest(StrictModel):
    """Body of POST /close: ends episodes before their end; unknown ones are counted, not an error."""

    episodes: list[EpisodeId] = Field(max_length=MAX_STATES)


class CloseReply(WireModel):
    """How many episodes were ended, and how many were not known."""

    closed: int
    unknown: int
