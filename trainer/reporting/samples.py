"""The records of samples.jsonl: one a sequence of tokens, which is a completion or a branch of an agent's episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from services.protocol.groups import Group, TokenSequence
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import scored

LOGGED_GROUPS = 8
"""Groups a step in samples.jsonl: enough to read, and a few hundred kilobytes a step at most."""
LOGGED_TOKENS = 16_384
"""Tokens a step in samples.jsonl, each with its text and numbers: some twenty bytes a token."""
TOKENS_A_CHARACTER = 4
"""A character of UTF-8 has at most four bytes, and a token at least one."""

Decode = Callable[[list[int]], str]
"""Returns the text of token ids, with special tokens."""


class SampleRecords:
    """The maker of records; it remembers the texts of the vocabulary's tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._before: list[int] = []
        """A token to decode others after, because some tokenizers leave out a space at the beginning of a text."""

    def of_step(
        self, step: int, groups: Sequence[Group], trained: Sequence[TrainingGroup] = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield the records of the first LOGGED_GROUPS groups of a step; docs/guides/operating.md explains the fields.

        Args:
            step: number of the step.
            groups: the step's fresh groups.
            trained: the groups as the loss saw them, from which the advantages are taken.
        """
        by_id = {group.group_id: group for group in trained if not group.is_replayed}
        room = LOGGED_TOKENS
        for group in groups[:LOGGED_GROUPS]:
            sequences = by_id[group.group_id].sequences if group.group_id in by_id else []
            seen = {id(e): s for e, s in zip(scored(group), sequences, strict=False)}
            rendered = self._decode(group.prompt_ids)
            self._before = self._before or group.prompt_ids[:1]
            for e in group.sequences:
                record = _record(step, group, e) | {"rendered_prompt": rendered}
                if e.tokens <= room:
                    room -= e.tokens
                    record["spans"] = list(self._spans(e, seen.get(id(e))))
                yield record

    def _spans(self, e: TokenSequence, trained: TokenSequence | None) -> Iterator[dict[str, Any]]:
        """Yield the tokens of an experience in spans: text that was read, or tokens that one policy version sampled.

        Sampled tokens have their log-probabilities and, if they were trained on, one advantage for all or one each.
        """
        labels = np.where(e.mask, e.policy_versions, -1).tolist()
        for version, places in groupby(range(len(labels)), key=labels.__getitem__):
            first, *rest = places
            span = slice(first, first + len(rest) + 1)
            if version < 0:
                yield {"text": self._decode(e.completion_ids[span].tolist())}
                continue
            yield {
                "version": version,
                "tokens": self.token_texts(e.completion_ids[span].tolist()),
                "logprobs": [round(logprob, 3) for logprob in e.logprobs[span].tolist()],
                "advantages": _advantages(trained, span),
            }

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Tokens that are a part of a character have none but the last, which has it."""
        texts: list[str] = []
        partial: list[int] = []
        for token in ids:
            text = self._texts.get(token)
            if text is None:
                text = self._texts[token] = self._text([token])
            if partial:
                text = self._text([*partial, token])
            is_whole = "\N{REPLACEMENT CHARACTER}" not in text or len(partial) + 1 == TOKENS_A_CHARACTER
            partial = [] if is_whole else [*partial, token]
            texts.append(text if is_whole else "")
        if partial:
            texts[-1] = self._text(partial)
        return texts

    def _text(self, ids: list[int]) -> str:
        return self._decode([*self._before, *ids]).removeprefix(self._decode(self._before))


def _record(step: int, group: Group, e: TokenSequence) -> dict[str, Any]:
    record = {
        "step": step,
        "group_id": group.group_id,
        "prompt": group.prompt.prompt,
        "ground_truth": group.prompt.ground_truth,
        "completion": e.completion,
        "reward": e.reward,
        "finish_reason": e.finish_reason.value,
        "policy_version": e.oldest_version,
        "tokens": e.tokens,
        "trained_tokens": e.trained_tokens,
        "result": e.scoring.model_dump(mode="json", exclude_none=True),
    }
    if group.prompt.source:
        record["source"] = group.prompt.source
    if group.prompt.row:
        record["row"] = group.prompt.shown_row
    if e.turns:
        record["turn_rewards"] = [turn.reward for turn in e.turns]
    if e.episode is not None:
        figures = (group.episode_figures or {}).get(e.episode)
        messages = [message.model_dump(exclude_defaults=True) for message in e.messages or ()]
        record |= {"episode": e.episode, **(figures.model_dump() if figures else {}), "messages": messages}
    return record


def _advantages(trained: TokenSequence | None, span: slice) -> float | list[float] | None:
    """Return the advantage of a span's tokens, or of each where they differ; None if they are not trained on."""
    if trained is None or trained.advantages is None or not trained.mask[span].any():
        return None
    advantages = [float(f"{advantage:.4g}") for advantage in trained.advantages[span].tolist()]
    return advantages[0] if len(set(advantages)) == 1 else advantages
