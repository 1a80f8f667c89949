"""Packing of groups into micro-batches without padding, and sharing of the micro-batches among the ranks.

A *piece* is a prompt with some of its group's completions. The tokens of a micro-batch's pieces lie one after the other
in one row: prompt, completion, completion, ..., prompt, ... A completion's positions continue its prompt's, and it
attends to its prompt and to itself only. So a prompt is computed once, however many completions share it. The last
token of a completion is not in the row, because no token is predicted from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingSequence:
    """One completion as the loss sees it: L tokens, each with its advantage."""

    completion_ids: list[int]
    behaviour_logprobs: list[float]
    """L log-probabilities; those of tokens outside the loss mask are not used."""
    advantages: list[float]
    """L advantages."""
    loss_mask: list[bool] | None = None
    """L flags, False for tokens that are read but not trained on, such as a tool's results; None: all are trained."""
    reward: float = 0.0
    has_own_advantages: bool = False
    """The advantages came with the completion, so none are computed from its reward."""
    values: list[float] | None = None
    """L values that the critic gave before the step; None without a critic."""
    returns: list[float] | None = None
    """L returns that the critic is fitted to; None without a critic."""
    episode: int | None = None
    """The episode within its group; None for a completion, which is an episode of its own."""

    def __post_init__(self) -> None:
        for name in ("behaviour_logprobs", "advantages", "loss_mask", "values", "returns"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.completion_ids):
                raise ValueError(
                    f"{len(self.completion_ids)} completion_ids but {len(values)} {name}: every completion token "
                    "needs one"
                )

    @property
    def read_ids(self) -> list[int]:
        """The tokens that a forward pass reads: all but the last, from which nothing is predicted."""
        return self.completion_ids[:-1]

    def trained(self, values: Sequence[T]) -> list[T]:
        """Return those of L ``values`` whose token is trained on."""
        return list(values) if self.loss_mask is None else list(compress(values, self.loss_mask))

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return len(self.completion_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True)
class TrainingGroup:
    """One prompt with its completions as the loss sees them."""

    prompt_ids: list[int]
    sequences: list[TrainingSequence]
    group_id: str = ""
    weight: float = 1.0
    """Importance weight: 1, unless the group was drawn by priority from the replay buffer."""
    is_replayed: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(
                f"group {self.group_id!r} has no prompt_ids: the first completion token is predicted from the prompt"
            )

    @property
    def tokens(self) -> int:
        """Tokens that a forward pass reads: the prompt once, and all but the last of every completion."""
        return len(self.prompt_ids) + sum(len(sequence.read_ids) for sequence in self.sequences)

    @property
    def trained_tokens(self) -> int:
        """The number of completion tokens that are trained on."""
        return sum(sequence.trained_tokens for sequence in self.sequences)

    @property
    def mean_absolute_advantage(self) -> float:
        """Mean of |advantage| over the trained tokens: the group's priority in the replay buffer."""
        total = sum(abs(a) for sequence in self.sequences for a in sequence.trained(sequence.advantages))
        return total / max(self.trained_tokens, 1)

    def all_ids(self) -> Iterator[list[int]]:
        """Yield the token ids of the prompt, then those of each completion."""
        yield self.prompt_ids
        for sequence in self.sequences:
            yield sequence.completion_ids


@dataclass(frozen=True)
class AttentionLayout:
    """The places of prompts and completions among the T packed tokens of a micro-batch.

    B is the number of pieces, S the number of completions, P the length of the longest prompt, and C the tokens read of
    the longest completion (at least 1). Inside attention, rows are padded with index 0; results there are never used.
    """

    prompt_rows: Tensor
    """[B, P] int64: packed index of each prompt token."""
    completion_rows: Tensor
    """[S, C] int64: packed index of each token read of a completion."""
    piece_of_completion: Tensor
    """[S] int64: index of the piece whose prompt the completion follows."""
    mask: Tensor
    """[S, 1, C, P + C]: the tokens of its prompt and completion that a completion token attends to, as bool or as
    numbers to add to the scores, 0 and -inf."""
    unpack: Tensor
    """[T] int64: index of each packed token in cat(prompt_rows.flatten(), completion_rows.flatten())."""

    def to(self, device: torch.device) -> AttentionLayout:
        """Return a copy on ``device``."""
        return replace(self, **_moved(self, device))

    def with_additive_mask(self, dtype: torch.dtype) -> AttentionLayout:
        """Return a copy whose mask holds numbers, its rows aligned for CUDA's attention kernels.

        The kernels would otherwise convert a bool mask in every layer, and keep each result for the backward pass.
        """
        *shape, keys = self.mask.shape
        padded = torch.zeros(*shape, -(-keys // 8) * 8, dtype=dtype, device=self.mask.device)
        mask = padded[..., :keys]
        return replace(self, mask=mask.masked_fill_(~self.mask, -torch.inf))


@dataclass(frozen=True)
class MicroBatch:
    """T packed tokens of B pieces with S completions, which have N trained tokens in all."""

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    layout: AttentionLayout
    predict_rows: Tensor
    """[N] int64: the packed index whose hidden state predicts each trained token."""
    targets: Tensor
    """[N] int64: the trained tokens."""
    sequence_ids: Tensor
    """[N] int64 in [0, S)."""
    behaviour_logprobs: Tensor
    """[N] float32."""
    advantages: Tensor
    """[N] float32."""
    old_values: Tensor
    """[N] float32: the critic's values before the step, 0 without a critic."""
    returns: Tensor
    """[N] float32: the critic's targets, 0 without a critic."""
    weights: Tensor
    """[N] float32: the importance weight of the group at each token."""
    is_replayed: Tensor
    """[N] bool: the group came from the replay buffer."""
    n_sequences: int
    is_filler: bool = False
    """True for a micro-batch without loss: its rank has none left, but must take part in the collectives."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``."""
        return replace(self, layout=self.layout.to(device), **_moved(self, device))


def _moved(record: AttentionLayout | MicroBatch, device: torch.device) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


KEYS_PER_TOKEN = 4
"""Most keys in attention for each token of the budget. Attention pads the completions of a micro-batch to the longest
and gives each a copy of its prompt's keys and values, so its memory depends on this number."""


@dataclass(frozen=True)
class _Size:
    """The size of pieces packed together."""

    tokens: int = 0
    completions: int = 0
    longest_prompt: int = 0
    longest_completion: int = 0

    @classmethod
    def of(cls, group: TrainingGroup) -> _Size:
        lengths = [len(sequence.read_ids) for sequence in group.sequences]
        return cls(group.tokens, len(lengths), len(group.prompt_ids), max(lengths, default=0))

    def __add__(self, other: _Size) -> _Size:
        return _Size(
            self.tokens + other.tokens,
            self.completions + other.completions,
            max(self.longest_prompt, other.longest_prompt),
            max(self.longest_completion, other.longest_completion),
        )

    def fits(self, max_tokens: int) -> bool:
        keys = self.completions * (self.longest_prompt + self.longest_completion)
        return self.tokens <= max_tokens and keys <= KEYS_PER_TOKEN * max_tokens


def share_out(groups: Sequence[TrainingGroup], n_ranks: int, max_tokens: int) -> list[list[list[TrainingGroup]]]:
    """Share groups among ranks and micro-batches: ``result[rank][micro_batch]`` is a list of pieces.

    Every rank gets the same number of micro-batches (some may be empty). Each has at most ``max_tokens`` tokens and,
    padding included, ``KEYS_PER_TOKEN`` times as many keys in attention; a completion beyond that gets a micro-batch of
    its own. The same groups are always shared in the same way.

    Args:
        groups: the groups to train on.
        n_ranks: the number of ranks.
        max_tokens: tokens in one micro-batch.
    """
    pieces = [piece for group in groups for piece in _split(group, max_tokens)]
    # With fewer pieces than ranks, halve the largest piece: an idle rank costs more than a second copy of the prompt.
    while len(pieces) < n_ranks:
        largest = max(pieces, key=lambda piece: len(piece.sequences), default=None)
        if largest is None or len(largest.sequences) < 2:
            break
        pieces.remove(largest)
        middle = len(largest.sequences) // 2
        pieces += [
            replace(largest, sequences=largest.sequences[:middle]),
            replace(largest, sequences=largest.sequences[middle:]),
        ]
    by_rank = _balance(pieces, n_ranks)
    filled = [_fill(own, max_tokens) for own in by_rank]
    most = max(len(batches) for batches in filled)
    return [batches + [[] for _ in range(most - len(batches))] for batches in filled]


def _split(group: TrainingGroup, max_tokens: int) -> list[TrainingGroup]:
    """Cut a group that exceeds the budget into pieces with completions of similar length; each repeats the prompt."""
    if not group.sequences:
        return []
    if _Size.of(group).fits(max_tokens):
        return [group]
    pieces: list[list[TrainingSequence]] = []
    size = _Size()
    for sequence in sorted(group.sequences, key=lambda sequence: len(sequence.completion_ids), reverse=True):
        length = len(sequence.read_ids)
        grown = size + _Size(length, 1, 0, length)
        if not pieces or not grown.fits(max_tokens):
            pieces.append([])
            prompt = len(group.prompt_ids)
            grown = _Size(prompt + length, 1, prompt, length)
        pieces[-1].append(sequence)
        size = grown
    return [replace(group, sequences=sequences) for sequences in pieces]


def _balance(pieces: list[TrainingGroup], n_ranks: int) -> list[list[TrainingGroup]]:
    """Give each piece, the longest first, to the rank with the fewest tokens so far."""
    loads = [0] * n_ranks
    by_rank: list[list[TrainingGroup]] = [[] for _ in range(n_ranks)]
    for piece in sorted(pieces, key=lambda piece: piece.tokens, reverse=True):
        rank = loads.index(min(loads))
        by_rank[rank].append(piece)
        loads[rank] += piece.tokens
    return by_rank


def _fill(pieces: list[TrainingGroup], max_tokens: int) -> list[list[TrainingGroup]]:
    """Fill micro-batches by first fit, longest completions first, so that similar lengths share one and pad little."""
    batches: list[list[TrainingGroup]] = []
    sizes: list[_Size] = []
    measured = [(piece, _Size.of(piece)) for piece in pieces]
    for piece, size in sorted(measured, key=lambda pair: pair[1].longest_completion, reverse=True):
        for i, used in enumerate(sizes):
            if used.tokens + size.tokens <= max_tokens and (grown := used + size).fits(max_tokens):
                batches[i].append(piece)
                sizes[i] = grown
                break
        else:
            batches.append([piece])
            sizes.append(size)
    return batches


def pack(pieces: Sequence[TrainingGroup]) -> MicroBatch:
    """Pack pieces into one micro-batch; no pieces give a filler of one token whose loss is 0."""
    is_filler = not pieces
    if is_filler:
        pieces = [TrainingGroup([0], [TrainingSequence([0], [0.0], [0.0])], weight=0.0)]
    ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    prompt_starts: list[tuple[int, int]] = []
    completion_starts: list[tuple[int, int]] = []
    piece_of_completion: list[int] = []
    sequences: list[TrainingSequence] = []
    for piece_index, piece in enumerate(pieces):
        prompt_length = len(piece.prompt_ids)
        last_of_prompt = len(ids) + prompt_length - 1
        prompt_starts.append((len(ids), prompt_length))
        ids += piece.prompt_ids
        positions += range(prompt_length)
        for sequence in piece.sequences:
            start, length = len(ids), len(sequence.read_ids)
            completion_starts.append((start, length))
            piece_of_completion.append(piece_index)
            rows = [last_of_prompt, *range(start, start + length)] if sequence.completion_ids else []
            predict += sequence.trained(rows)
            ids += sequence.read_ids
            positions += range(prompt_length, prompt_length + length)
            sequences.append(sequence)
    groups = [piece for piece in pieces for _ in piece.sequences]
    lengths = torch.tensor([s.trained_tokens for s in sequences])
    return MicroBatch(
        input_ids=torch.tensor(ids),
        position_ids=torch.tensor(positions),
        layout=_attention_layout(prompt_starts, completion_starts, piece_of_completion, len(ids)),
        predict_rows=torch.tensor(predict, dtype=torch.int64),
        targets=torch.tensor([x for s in sequences for x in s.trained(s.completion_ids)], dtype=torch.int64),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(lengths),
        behaviour_logprobs=_per_token(sequences, [s.behaviour_logprobs for s in sequences]),
        advantages=_per_token(sequences, [s.advantages for s in sequences]),
        old_values=_per_token(sequences, [s.values for s in sequences]),
        returns=_per_token(sequences, [s.returns for s in sequences]),
        weights=torch.tensor([group.weight for group in groups]).repeat_interleave(lengths),
        is_replayed=torch.tensor([group.is_replayed for group in groups]).repeat_interleave(lengths),
        n_sequences=len(sequences),
        is_filler=is_filler,
    )


def _per_token(sequences: Sequence[TrainingSequence], numbers: Sequence[Sequence[float] | None]) -> Tensor:
    """Return the numbers [N], float32, of the trained tokens of completions; 0 for a completion without numbers."""
    full = [[0.0] * len(s.completion_ids) if own is None else own for s, own in zip(sequences, numbers, strict=True)]
    return torch.tensor([x for s, own in zip(sequences, full, strict=True) for x in s.trained(own)]).float()


def _attention_layout(
    prompts: list[tuple[int, int]], completions: list[tuple[int, int]], piece_of_completion: list[int], n_tokens: int
) -> AttentionLayout:
    prompt_start, prompt_length = torch.tensor(prompts).unbind(1)
    completion_start, completion_length = torch.tensor(completions).unbind(1)
    piece = torch.tensor(piece_of_completion)
    p, c = torch.arange(int(prompt_length.max())), torch.arange(max(int(completion_length.max()), 1))
    prompt_valid, completion_valid = p < prompt_length[:, None], c < completion_length[:, None]
    prompt_rows = torch.where(prompt_valid, prompt_start[:, None] + p, 0)
    completion_rows = torch.where(completion_valid, completion_start[:, None] + c, 0)
    causal = (c[:, None] >= c[None, :]).expand(len(completions), -1, -1)
    sees_prompt = prompt_valid[piece][:, None, :].expand(-1, len(c), -1)
    unpack = torch.empty(n_tokens, dtype=torch.int64)
    unpack[prompt_rows[prompt_valid]] = prompt_valid.flatten().nonzero().squeeze(1)
    unpack[completion_rows[completion_valid]] = prompt_valid.numel() + completion_valid.flatten().nonzero().squeeze(1)
    return AttentionLayout(
        prompt_rows=prompt_rows,
        completion_rows=completion_rows,
        piece_of_completion=piece,
        mask=torch.cat([sees_prompt, causal], dim=2)[:, None],
        unpack=unpack,
    )
