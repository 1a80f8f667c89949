"""From the traces of episodes to sequences that continue one prompt, with rewards of turns and messages to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import orjson
from prometheus_client import Counter

from services.clients.agent_episodes import Episode
from services.protocol.episodes import CalledTool, Message
from services.protocol.groups import TokenSequence, Turn
from services.protocol.sessions import TraceSequence

MOST_CHARACTERS = 50_000
"""Longer conversations are cut. The tokens of such a conversation take eight times its space on the wire."""


def shorten(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return chat messages as people read them. Text beyond MOST_CHARACTERS is cut; a note says how much.

    A part of a message that is not text, such as an image, becomes its type in brackets.
    """
    short: list[Message] = []
    left = MOST_CHARACTERS
    tools: dict[str, str] = {}
    """Names of tools by the id of their call."""

    def cut(text: str) -> str:
        nonlocal left
        kept, left = text[:left], max(left - len(text), 0)
        return kept if len(kept) == len(text) else f"{kept}… {len(text) - len(kept)} more characters"

    for message in messages:
        role = str(message.get("role"))
        name = tools.get(str(message.get("tool_call_id")), message.get("name"))
        if left == 0:
            return [*short, Message(role=role, content=f"… {len(messages) - len(short)} more messages")]
        calls = []
        content = cut(_text(message.get("content")))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            calls.append(CalledTool(name=str(function.get("name")), arguments=cut(_text(function.get("arguments")))))
            tools[str(call.get("id"))] = calls[-1].name
        sampled = message.get("sampled") is True
        short.append(Message(role=role, content=content, tool_calls=calls, name=name and str(name), sampled=sampled))
    return short


def _text(content: Any) -> str:
    """Return the text of a message's content, of its parts, or of a tool call's arguments."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)
    return orjson.dumps(content).decode()


LOST_TOKENS = Counter(
    "trainer_episode_tokens_lost", "Tokens of episodes that cannot be trained on, by reason.", ["reason"]
)


def sequences_of(episodes: Sequence[Episode]) -> tuple[list[int], list[TokenSequence]]:
    """Return the prompt that all sequences of the episodes share, and the sequences that continue it.

    The prompt is the longest common prefix of the sequences' prompts; the rest of a sequence's prompt is among its
    completion tokens, outside the loss mask. Sequences without a sampled token are left out. So are sequences that
    begin with another token than the first one; their sampled tokens are counted as lost.
    """
    sampled = [(e, s) for e in episodes for s in e.trace.sequences if s.trained_tokens]
    kept = [(e, s) for e, s in sampled if s.prompt_ids[0] == sampled[0][1].prompt_ids[0]]
    if lost := sum(s.trained_tokens for _, s in sampled) - sum(s.trained_tokens for _, s in kept):
        LOST_TOKENS.labels("no_common_prompt").inc(lost)
    columns = zip(*(s.prompt_ids for _, s in kept), strict=False)
    prompt_ids = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return prompt_ids, [_sequence(e, s, len(prompt_ids)) for e, s in kept]


def _sequence(episode: Episode, trace: TraceSequence, shared: int) -> TokenSequence:
    """Return a sequence of a trace that continues the first ``shared`` tokens of its prompt."""
    context = trace.prompt_ids[shared:]
    messages = shorten(trace.messages)
    if any(turn.call == episode.trace.turns - 1 for turn in trace.turns or ()):
        messages[-1] = messages[-1].model_copy(update={"is_last": True})
    return TokenSequence(
        completion=trace.text,
        completion_ids=np.concatenate([np.array(context, np.int32), trace.completion_ids]),
        logprobs=np.concatenate([np.zeros(len(context)), np.where(trace.mask, trace.logprobs, 0.0)]),
        loss_mask=np.concatenate([np.zeros(len(context), bool), trace.mask]),
        # No policy sampled the context, so any version will do.
        policy_versions=np.concatenate([np.repeat(trace.policy_versions[:1], len(context)), trace.policy_versions]),
        finish_reason=trace.finish_reason,
        result=episode.result,
        episode=episode.trace.index,
        seat=episode.seat,
        messages=messages,
        turns=_turns(episode, trace, len(context)),
    )


def _turns(episode: Episode, trace: TraceSequence, context: int) -> list[Turn] | None:
    """Return a sequence's turns with their rewards, ``context`` tokens further on; None where the episode has none.

    The episode's reward is the sum of all: the last call has what the agent gave for the episode beyond its turns.
    Calls with one prompt have the rewards of all of them, as the choices of one call have its reward.
    """
    rewards = list(episode.turn_rewards)
    if not rewards or not trace.turns or episode.result.reward is None:
        return None
    rewards[-1] += episode.result.reward - math.fsum(rewards)
    firsts: dict[int, int] = {}
    for call, number in sorted((t.call or 0, t.number) for s in episode.trace.sequences for t in s.turns or ()):
        firsts.setdefault(number, call)
    calls = [firsts[turn.number] for turn in trace.turns]
    return [
        Turn(
            number=turn.number,
            start=turn.start + context,
            end=turn.end + context,
            reward=math.fsum(rewards[first:following]),
        )
        for turn, first, following in zip(trace.turns, calls, [*calls[1:], len(rewards)], strict=True)
    ]
