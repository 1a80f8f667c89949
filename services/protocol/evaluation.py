"""The types of requests and replies between evaluation head, environment servers and the head's page.

An *episode* runs an environment from reset to end. A *state* is an observation of the environment: numbers (a number,
or nested lists of one shape) or the messages of a conversation. An *action* is a policy's reply to a state: an index,
numbers, or the text of a completion.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, model_validator

from services.protocol.base import Count, Finite, Seed, StrictModel, WireModel

# The receiving policy or environment checks the contents, because it knows their shape.
State = StrictFloat | list[Any]
Action = StrictInt | StrictFloat | str | list[Any]

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/@+-]*$")]
EpisodeId = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._:-]+$")]


def _is_none(value: object) -> bool:
    return value is None


MAX_STATES = 4096
"""Most states in one request."""


class StateKind(StrEnum):
    """The form of states."""

    NUMBERS = "numbers"
    MESSAGES = "messages"


class ActionKind(StrEnum):
    """The form of actions."""

    INDEX = "index"
    NUMBERS = "numbers"
    TEXT = "text"


class StateSpec(WireModel):
    """The form of a policy's or environment's states; ``shape`` is for numbers."""

    kind: StateKind
    shape: list[Count] = Field(default_factory=list, max_length=8)


class ActionSpec(WireModel):
    """The form of a policy's or environment's actions.

    ``shape`` is for numbers; an index is one of the ``count`` integers from ``start`` on.
    """

    kind: ActionKind
    shape: list[Count] = Field(default_factory=list, max_length=8)
    count: Count | None = None
    start: int = 0


# --- evaluation head: /evaluate --------------------------------------------------------------------------------------


class EpisodePosition(StrictModel):
    """The episode of a state, the number of its actions so far, and the sum of its rewards so far."""

    episode: EpisodeId
    step: Count = 0
    episode_return: Finite = 0.0


class FinishedEpisode(StrictModel):
    """An episode that has ended after ``steps`` actions; ``episode_return`` is the sum of its rewards."""

    episode: EpisodeId
    steps: Count
    episode_return: Finite
    seed: Seed | None = None


class EvaluateRequest(StrictModel):
    """Body of POST /evaluate: asks the policy for the actions for one ``state``, or for many ``states``.

    The head lists the sender under the name ``server``. A server that also sends an ``instance_key``, a secret that it
    has chosen, reserves its name. ``episodes`` has one entry a state. ``finished`` reports episodes that have ended;
    each is counted once, however often it is reported. A request may consist of reports alone. ``logprobs`` asks for
    the actions' log-probabilities.
    """

    policy: Name | None = None
    server: Name = "anonymous"
    instance_key: Annotated[str, Field(min_length=16, max_length=100)] | None = None
    environment: Name | None = None
    state: State | None = None
    states: list[State] | None = Field(default=None, max_length=MAX_STATES)
    episodes: list[EpisodePosition] | None = Field(default=None, max_length=MAX_STATES)
    finished: list[FinishedEpisode] = Field(default_factory=list, max_length=MAX_STATES)
    logprobs: bool = Field(default=False, exclude_if=lambda value: not value)

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
        """The states in order, from ``state`` or ``states``."""
        return self.states or [] if self.state is None else [self.state]


class EvaluateReply(WireModel):
    """Reply of POST /evaluate: one action a state, in order; ``action`` is the first, for requests with ``state``.

    ``policy_versions`` has the version that chose each action, because a policy may be reloaded between two batches.
    ``logprobs`` is there if the request asked for it; None for an action whose policy gives no log-probability.
    """

    policy: str
    policy_versions: list[int | None]
    actions: list[Action]
    action: Action | None = None
    logprobs: list[float | None] | None = Field(default=None, exclude_if=_is_none)


# --- evaluation head: servers ---------------------------------------------------------------------------------------


class ServerState(StrEnum):
    """The state of an environment server, as the head sees it."""

    CONNECTED = "connected"
    STARTING = "starting"
    UNREACHABLE = "unreachable"
    SILENT = "silent"


class ServerMode(StrEnum):
    """The side that runs episodes: the head asks for states (``driven``) or the server for actions (``pushing``)."""

    DRIVEN = "driven"
    PUSHING = "pushing"
    IDLE = "idle"


class DiscoveredServer(WireModel):
    """An environment server that discovery found in a cluster, a SkyServe service, or a given address.

    ``entrance`` is the address of the load balancer of a replica's service, whose requests SkyServe counts to scale.
    """

    name: str
    source: Literal["cluster", "service", "address"]
    status: str
    url: str | None = None
    entrance: str | None = None


class DiscoveryReply(WireModel):
    """Reply of GET /discovered and POST /discover.

    ``errors`` has the error of each source that failed; its servers of the last successful look are kept.
    """

    enabled: bool
    prefix: str | None
    servers: list[DiscoveredServer]
    errors: dict[str, str] = Field(default_factory=dict)
    age_seconds: float | None = None


# --- environment server ----------------------------------------------------------------------------------------------


class EnvironmentInfo(WireModel):
    """An environment and the form of its states and actions.

    An environment with several ``seats`` is a game whose players, numbered from 0, take turns. Fields about seats are
    absent from the wire where there is one. ``deterministic`` declares that seed and actions determine all states and
    rewards, on every server with the same ``version``; both are absent where the environment declares nothing.
    """

    id: str
    state: StateSpec
    action: ActionSpec
    max_steps: int
    seats: int = Field(default=1, ge=1, exclude_if=lambda seats: seats == 1)
    deterministic: bool = Field(default=False, exclude_if=lambda is_declared: not is_declared)
    version: str = Field(default="", exclude_if=lambda version: not version)


class EnvironmentServerHealth(WireModel):
    """Further fields of an environment server's GET /health, which the head reads.

    ``instance`` is another one after a restart.
    """

    name: Name
    environment: str = Field(min_length=1, max_length=100)
    pushing: bool
    instance: str = ""


class ResetRequest(StrictModel):
    """Body of POST /reset: begins ``episodes`` episodes of the environment of ``source``, without one of the first.

    The i-th episode has seed ``seed`` + i; the same seed begins the same episode. A repeated ``request_id`` gets the
    same episodes again. An environment of numbered tasks draws its task from ``split``; others have no splits, and
    ignore it.
    """

    episodes: int = Field(default=1, ge=1, le=1024)
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=100)
    split: str | None = Field(default=None, min_length=1, max_length=100)
    source: str = Field(default="", exclude_if=lambda source: not source)


class EpisodeStart(WireModel):
    """An episode that has begun, and its first state; ``seat`` is the seat that acts first, where there are several."""

    episode: str
    seed: int
    state: State
    seat: Count | None = Field(default=None, exclude_if=_is_none)


class ResetReply(WireModel):
    """Reply of POST /reset: the environment and the episodes that have begun.

    ``instance`` is that of the /health of the server that has them.
    """

    environment: EnvironmentInfo
    episodes: list[EpisodeStart]
    instance: str = ""


class StepItem(StrictModel):
    """An action in an episode after ``step`` other actions; a repeated step gets the same result again."""

    episode: EpisodeId
    step: Count
    action: Action


PROGRAM = "program"
"""The split of a task whose episodes have one action, a ProgramRequest as JSON. Its step is refused while the program
runs, and is asked for again."""


class ProgramRequest(StrictModel):
    """An agent's program to play a task in its box."""

    command: str
    """AGENT_COMMAND."""
    base_url: str
    """The address of the episode's session at the gateway; ``api_key`` is its key."""
    api_key: str
    example: dict[str, Any]
    """The row that the program reads."""
    seconds: float
    """AGENT_SECONDS."""
    patience: float
    """Seconds for which a call is sent again while the gateway is away."""
    max_turns: int
    max_turn_tokens: int


class StepRequest(StrictModel):
    """Body of POST /step: at most one action an episode."""

    steps: list[StepItem] = Field(min_length=1, max_length=MAX_STATES)

    @model_validator(mode="after")
    def _one_action_an_episode(self) -> Self:
        if len({item.episode for item in self.steps}) < len(self.steps):
            raise ValueError("an episode occurs twice; send one action an episode at a time")
        return self


class StepStatus(StrEnum):
    """The state of an episode after an action.

    ``terminated`` and ``truncated`` are gymnasium's. ``refused``: the action is invalid, and the episode is unchanged.
    ``lost``: the server does not know the episode (it restarted, or the episode was idle for too long), or the
    environment failed.
    """

    RUNNING = "running"
    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    LOST = "lost"


class StepResult(WireModel):
    """The result of an action; after ``refused`` and ``lost``, ``state`` is None and ``detail`` says why.

    ``environment_failed`` tells an environment that failed by itself, and may do so again, from a lost server.

    ``figures`` has named numbers about the action, such as whether it was a legal move, to be averaged over actions.

    With several seats, ``seat`` acts next and sees ``state``; at the end of an episode it is the seat that acted.
    ``rewards`` has one reward a seat, which a seat may get for another one's action. ``reward`` and ``episode_return``
    are then seat 0's.
    """

    episode: str
    status: StepStatus
    state: State | None = None
    reward: float = 0.0
    steps: int = 0
    episode_return: float = 0.0
    detail: str | None = None
    environment_failed: bool = Field(default=False, exclude_if=lambda failed: not failed)
    figures: dict[str, Finite] = Field(default_factory=dict, exclude_if=lambda figures: not figures)
    seat: Count | None = Field(default=None, exclude_if=_is_none)
    rewards: list[Finite] | None = Field(default=None, exclude_if=_is_none)

    @property
    def is_taken(self) -> bool:
        """True if the action was taken, so that there is a state after it."""
        return self.status not in (StepStatus.REFUSED, StepStatus.LOST)


class StepReply(WireModel):
    """Reply of POST /step: one result an item, in order."""

    results: list[StepResult]


class CloseRequest(StrictModel):
    """Body of POST /close: ends episodes early; unknown episodes are counted, not refused."""

    episodes: list[EpisodeId] = Field(max_length=MAX_STATES)


class CloseReply(WireModel):
    """Reply of POST /close: the numbers of ended and of unknown episodes."""

    closed: int
    unknown: int
