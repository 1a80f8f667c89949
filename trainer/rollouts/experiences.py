"""From the traces of episodes to experiences: token ids, loss mask, log-probabilities and rewards of turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson
from prometheus_client import Counter

from services.clients.agent_episodes import Episode
from services.protocol.episodes import CalledTool, Message
from services.protocol.groups import Experience, TurnReward, VersionSpan
from services.protocol.sessions import TraceSequence

LOST_TOKENS = Counter(
    "trainer_episode_tokens_lost", "Tokens of episodes that cannot be trained on, by reason.", ["reason"]
)


def experiences_of(episodes: Sequence[Episode]) -> tuple[list[int], list[Experience]]:
    """Return the prompt that all sequences of the episodes share, and the sequences as experiences that continue it.

    The prompt is the longest common prefix of the sequences' prompts; the rest of a sequence's prompt is among its
    completion tokens, outside the loss mask. Sequences without a sampled token are left out. So are sequences that
    begin with another token than the first one; their sampled tokens are counted as lost.
    """
    found = [(e, s) for e in episodes for s in e.trace.sequences if any(s.loss_mask)]
    kept = [(e, s) for e, s in found if s.prompt_ids[0] == found[0][1].prompt_ids[0]]
    if lost := sum(sum(s.loss_mask) for _, s in found) - sum(sum(s.loss_mask) for _, s in kept):
        LOST_TOKENS.labels("no_common_prompt").inc(lost)
    columns = zip(*(s.prompt_ids for _, s in kept), strict=False)
    prompt_ids = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return prompt_ids, [_experience(e, s, len(prompt_ids)) for e, s in kept]


def _experience(episode: Episode, sequence: TraceSequence, shared: int) -> Experience:
    """Return a sequence as an experience that continues the first ``shared`` tokens of its prompt."""
    context = sequence.prompt_ids[shared:]
    spans = [
        VersionSpan(version=span.version, start=span.start + len(context), end=span.end + len(context))
        for span in sequence.policy_versions
    ]
    # No policy sampled the context; its span must not make the experience older.
    unsampled = [VersionSpan(version=spans[0].version, start=0, end=len(context))] if context else []
    logprobs = [x if is_sampled else 0.0 for x, is_sampled in zip(sequence.logprobs, sequence.loss_mask, strict=True)]
    messages = readable(sequence.messages)
    if any(turn.call == episode.trace.turns - 1 for turn in sequence.turns):
        messages[-1] = messages[-1].model_copy(update={"is_last": True})
    return Experience(
        completion=sequence.text,
        completion_ids=[*context, *sequence.completion_ids],
        logprobs=[0.0] * len(context) + logprobs,
        loss_mask=[False] * len(context) + sequence.loss_mask,
        policy_versions=[*unsampled, *spans],
        finish_reason=sequence.finish_reason,
        result=episode.result,
        episode=episode.trace.index,
        seat=episode.seat,
        messages=messages,
        turns=_turns(episode, sequence, len(context)),
    )


def _turns(episode: Episode, sequence: TraceSequence, context: int) -> list[TurnReward] | None:
    """Return a sequence's turns with their rewards, ``context`` tokens further on; None where the episode has none.

    The episode's reward is the sum of all: the last call has what the agent gave for the episode beyond its turns.
    Calls at one place have the rewards of all calls there, as the choices of one call have its reward.
    """
    rewards = list(episode.turn_rewards)
    if not rewards or not sequence.turns or episode.result.reward is None:
        return None
    rewards[-1] += episode.result.reward - math.fsum(rewards)
    firsts: dict[int, int] = {}
    for turn in sorted((t for s in episode.trace.sequences for t in s.turns), key=lambda turn: turn.call):
        firsts.setdefault(turn.place, turn.call)
    calls = [firsts[turn.place] for turn in sequence.turns]
    return [
        TurnReward(
            number=turn.place,
            start=turn.start + context,
            end=turn.end + context,
            reward=math.fsum(rewards[first:following]),
        )
        for turn, first, following in zip(sequence.turns, calls, [*calls[1:], len(rewards)], strict=True)
    ]


MOST_CHARACTERS = 50_000
"""Longer conversations are cut. The tokens of such a conversation take eight times its space on the wire."""


def readable(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return chat messages as people read them; the text beyond MOST_CHARACTERS is left out, which the text says.

    A part of a message that is not text, such as an image, becomes its type in brackets.
    """
    shown: list[Message] = []
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
            return [*shown, Message(role=role, content=f"… {len(messages) - len(shown)} more messages")]
        calls = []
        content = cut(_text(message.get("content")))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            calls.append(CalledTool(name=str(function.get("name")), arguments=cut(_text(function.get("arguments")))))
            tools[str(call.get("id"))] = calls[-1].name
        sampled = message.get("sampled") is True
        shown.append(Message(role=role, content=content, tool_calls=calls, name=name and str(name), sampled=sampled))
    return shown


def _text(content: Any) -> str:
    """Return the text of a message's content, of its parts, or of a tool call's arguments."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)
    return orjson.dumps(content).decode()
