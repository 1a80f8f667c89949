"""The types of the gateway's sessions: one episode of an agent, its calls, and the trace that is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from services.protocol.base import MAX_TOKENS, Count, Finite, Seed, StrictModel, TokenId, WireModel
from services.protocol.chat import EpisodeFigures
from services.protocol.groups import Tokens
from services.protocol.rewards import FinishReason


class CreateSessionRequest(StrictModel):
    """Body of POST /sessions. Creating a session again with the same body changes nothing.

    Temperature, top_p and seed replace those of the agent's requests; an agent may ask for shorter turns than
    ``max_turn_tokens``. The limits bound the whole episode: ``max_turns`` calls, ``max_tokens`` sampled tokens, and
    ``deadline_seconds`` from the creation on. ``lora_path`` names the LoRA adapter that samples; None: the model alone.
    """

    id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")
    group_id: str = ""
    index: Count = 0
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: Seed | None = None
    max_turn_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS)
    max_turns: int = Field(default=64, ge=1)
    max_tokens: int = Field(default=16_384, ge=1, le=MAX_TOKENS)
    deadline_seconds: float = Field(default=3600, gt=0)
    lora_path: str | None = Field(default=None, min_length=1, max_length=200)


class SessionReply(WireModel):
    """Reply of POST /sessions and GET /sessions/{id}; an open session takes calls.

    ``called`` says whether the agent has made a call, answered or not. ``refused`` names the limit over which the
    newest call was refused: ``max_turns``, ``max_tokens`` or DEADLINE. ``waited_seconds`` is the time in which calls
    were answered. A gateway that restarts forgets refused and unanswered calls, and that time.
    """

    id: str
    status: Literal["open", "finished"]
    called: bool = False
    turns: int = 0
    sampled_tokens: int = 0
    reward: Finite | None = None
    reason: str | None = None
    refused: str | None = None
    waited_seconds: float = 0.0


class RewardRequest(StrictModel):
    """Body of POST /sessions/{id}/reward: a number, or none with the reason why the episode has no reward."""

    reward: Finite | None
    reason: str | None = None


class FinishRequest(RewardRequest):
    """Body of POST /sessions/{id}/finish: the episode's reward.

    ``received`` lists finished sessions whose traces have arrived; the gateway deletes them. A trace can be asked for
    again until then, so that a lost reply costs nothing.
    """

    received: list[str] = Field(default_factory=list)


DEADLINE = "deadline_seconds"
"""The limit over which a call is refused when no engine answers until the session's deadline, and after it. The agent
is not at fault: the trainer ends an episode before that if the agent's own time is over."""
END_BEFORE = "stop the agent's loop earlier, or catch this error and return a reward"
"""The advice to an agent in the refusal of a call over a session's limit."""
REQUEST_MARK = "X-Request-Mark"
"""A header by which RetryingTransport marks agents' requests: one mark for all attempts to send a request, and another
for each other request."""


class TraceSequence(Tokens):
    """One sequence of an episode's tokens, from a prompt to a leaf of its tree of calls.

    Every sampled token of the episode has ``loss_mask`` True in exactly one sequence and is context (False) in others.
    ``text`` is the last turn's. ``messages`` is the conversation as the agent and the model wrote it; the model's
    messages have ``sampled`` true.
    """

    prompt_ids: list[TokenId] = Field(min_length=1)
    text: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)


class Trace(EpisodeFigures):
    """Reply of POST /sessions/{id}/finish and GET /sessions/{id}/trace: the whole episode.

    ``refused`` names the limit over which the newest call was refused, as in SessionReply. ``lost_tokens`` counts, by
    reason, tokens that an engine sampled and no sequence has.
    """

    id: str
    group_id: str
    index: int
    reward: Finite | None
    reason: str | None
    sequences: list[TraceSequence]
    sampled_tokens: int
    refused: str | None = None
    lost_tokens: dict[str, int] = Field(default_factory=dict)

    @property
    def last(self) -> list[TraceSequence]:
        """The sequences that end with a turn of the newest call; none without calls."""
        return [s for s in self.sequences if any(turn.call == self.turns - 1 for turn in s.turns or ())]

    @property
    def is_cut(self) -> bool:
        """True if the model's last answer was cut off at a limit of its length."""
        return any(sequence.finish_reason is FinishReason.LENGTH for sequence in self.last)


class GatewayStats(WireModel):
    """Reply of GET /stats. Counts cover the life of the gateway's directory, across restarts.

    ``engine_tokens`` counts the tokens that engines sampled, and equals the sum of the others: tokens in the traces of
    finished sessions, tokens in open sessions, and tokens lost, by reason.
    """

    open_sessions: int
    calls_in_flight: int
    engine_tokens: int
    trace_tokens: int
    open_tokens: int
    lost_tokens: dict[str, int]
    nodes: int = 1
    """Nodes of the gateway, among which the sessions are shared."""

    @classmethod
    def sum_of(cls, nodes: Sequence[GatewayStats]) -> GatewayStats:
        """Return the sums over the gateway's nodes."""
        lost: Counter[str] = Counter()
        for one in nodes:
            lost.update(one.lost_tokens)
        names = ("open_sessions", "calls_in_flight", "engine_tokens", "trace_tokens", "open_tokens")
        sums = {name: sum(getattr(one, name) for one in nodes) for name in names}
        return cls(**sums, lost_tokens=dict(lost), nodes=nodes[0].nodes)
