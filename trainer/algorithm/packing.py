"""Packing of groups into micro-batches: their tokens as trees in depth-first order.

The prompt and completions of a group are a prefix tree: equal tokens after equal tokens are one node, whether they are
the prompt, an episode's earlier turns, or what two completions happen to begin with. The nodes lie one after the other
in depth-first order, and the trees of a micro-batch in one row. A token sees the token at k before it as long as the
subtree of k has not ended. So every distinct token is computed once. The last token of a completion is not in the row,
unless another completion continues it, because no token is predicted from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.protocol.groups import TEACHER, TokenSequence, pack_sequences, unpack_sequences
from services.protocol.rewards import FinishReason
from trainer.algorithm.attention_layout import AttentionLayout, PathRows, TreeMask
from trainer.algorithm.segments import Segments

Order = type[AttentionLayout] | type[TreeMask] | type[PathRows]
Rows = NDArray[np.int64]
"""Packed indices."""
Ids = NDArray[np.int32]

BASELINE = "teacher_baseline"
"""The array of a sequence with what the gradient subtracts from the distances from the teacher; see teachers.py."""
VALUES, RETURNS = "values", "returns"
"""The arrays of a sequence, besides its own, with the values that the critic gave before the step, and the returns that
the critic is fitted to."""


@dataclass(frozen=True)
class Branch:
    """A completion's way through its group's prefix tree, from the prompt's first token on."""

    sequence: TokenSequence
    index: int
    """The place of the completion in its group."""
    shared: int
    """Tokens that are also those of the branch before, in depth-first order."""
    length: int
    """Tokens that a forward pass reads."""

    @property
    def new(self) -> int:
        """Tokens that the branches before do not have."""
        return self.length - self.shared


@dataclass(frozen=True)
class TrainingGroup:
    """One prompt with its completions as the loss sees them."""

    prompt_ids: list[int]
    sequences: list[TokenSequence]
    group_id: str = ""
    weight: float = 1.0
    """Importance weight: 1, unless the group was drawn by priority from the replay buffer."""
    is_replayed: bool = False
    source: str = ""
    """Statistics over a batch are taken over the groups of one source."""
    epoch: int = 0
    position: int = 0
    """With the epoch, the prompt's place in the data: an order of groups whenever they arrived."""
    cut_from: int = 0
    """The trained tokens of the whole group, if this is a piece of one."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(
                f"group {self.group_id!r} has no prompt_ids: the first completion token is predicted from the prompt"
            )

    @cached_property
    def branches(self) -> list[Branch]:
        """The completions in depth-first order of the group's prefix tree."""
        reads = [read_ids(sequence) for sequence in self.sequences]
        # Bytes of unsigned integers with the highest byte first are in the order of the integers.
        order = sorted(range(len(reads)), key=[ids.astype(">u4").tobytes() for ids in reads].__getitem__)
        prompt = len(self.prompt_ids)
        shared = [0, *(prompt + _common(reads[i], reads[j]) for i, j in pairwise(order))]
        return [Branch(self.sequences[i], i, shared[n], prompt + len(reads[i])) for n, i in enumerate(order)]

    @property
    def tokens(self) -> int:
        """Distinct tokens that a forward pass reads: the nodes of the group's prefix tree."""
        return sum(branch.new for branch in self.branches)

    @property
    def trained_tokens(self) -> int:
        """The number of completion tokens that are trained on."""
        return sum(sequence.trained_tokens for sequence in self.sequences)

    @property
    def mean_absolute_advantage(self) -> float:
        """Mean of |advantage| over the trained tokens: the group's priority in the replay buffer."""
        total: float = sum(
            abs(a) for s in self.sequences if s.advantages is not None for a in s.trained(s.advantages).tolist()
        )
        return total / max(self.trained_tokens, 1)

    def all_ids(self) -> NDArray[np.int64]:
        """Return the token ids of the prompt, then those of each completion."""
        return np.concatenate([np.array(self.prompt_ids, np.int64), *(s.completion_ids for s in self.sequences)])


def pack_group(group: TrainingGroup) -> bytes:
    """Return a group as bytes for the other ranks, without the texts that no rank trains on."""
    header = {field.name: getattr(group, field.name) for field in fields(group) if field.name != "sequences"}
    return pack_sequences(header, [s.model_copy(update={"completion": "", "messages": None}) for s in group.sequences])


def unpack_group(data: bytes | memoryview) -> TrainingGroup:
    """Return the group of ``pack_group``, equal to the bit. Nothing is checked, because rank 0 has checked it."""
    header, sequences = unpack_sequences(data)
    return TrainingGroup(**header, sequences=[TokenSequence.trusted(fields) for fields in sequences])


def text_group(ids: Sequence[int]) -> TrainingGroup:
    """Return a text as a group, by which to compute the log-probability of each of its tokens but the first."""
    zeros = [0] * (len(ids) - 1)
    rest = TokenSequence(completion_ids=ids[1:], logprobs=zeros, policy_versions=zeros, finish_reason=FinishReason.STOP)
    return TrainingGroup([ids[0]], [rest])


FILLER = replace(text_group([0, 0]), weight=0.0)
"""A group of one token whose loss is 0."""


class Context(NamedTuple):
    """A rank's place in its context group, the ranks that compute each micro-batch together."""

    group: str = ""
    """The name of the process group; "" for a rank by itself."""
    rank: int = 0
    size: int = 1


ALONE = Context()


@dataclass(frozen=True)
class MicroBatch:
    """T packed tokens of pieces with S completions, which have N trained tokens in all, predicted from U states.

    A rank of a context group has an equal part of the packed tokens, one stretch of the row, and the states that its
    tokens give: T and U count these, and M of the trained tokens are predicted from them. The layout, and all else that
    belongs to the N trained tokens, is whole on every rank of the group.
    """

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64: the depth in the tree."""
    layout: AttentionLayout | TreeMask | PathRows
    """For attention over trees on a CPU, for that on CUDA, or for a model's own forward pass over rows."""
    segments: Segments | None
    """For recurrent layers over trees; None for rows."""
    predict_rows: Tensor
    """[U] int64, ascending: the packed indices whose hidden states predict trained tokens."""
    state_ids: Tensor
    """[M] int64 in [0, U): which of the states predicts each trained token. Where completions part, one predicts
    several."""
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
    teacher_logprobs: Tensor
    """[N] float32: a frozen teacher's log-probabilities, NaN where no teacher has scored the token."""
    teacher_baselines: Tensor
    """[N] float32: the baselines of the distances from the teacher, 0 where there is none."""
    group_tokens: Tensor
    """[N] int64: the trained tokens of the token's whole group."""
    weights: Tensor
    """[N] float32: the importance weight of the group at each token."""
    is_replayed: Tensor
    """[N] bool: the group came from the replay buffer."""
    n_replayed: int
    """Number of the N tokens that came from the replay buffer."""
    n_sequences: int
    sources: tuple[str, ...] = ()
    """The name of the source of each completion, S of them."""
    is_filler: bool = False
    """True for a micro-batch without loss: its rank has none left, but must take part in the collectives."""
    context: Context = ALONE
    own: Tensor | None = None
    """[M] int64 in [0, N), ascending: the trained tokens that are predicted on this rank; None for all of them."""

    def part(self, context: Context) -> MicroBatch:
        """Return the part of a rank of a context group; the micro-batch is whole, and its row divisible by the size."""
        if context.size == 1:
            return self
        length = len(self.input_ids) // context.size
        start, end = context.rank * length, (context.rank + 1) * length
        first, last = torch.searchsorted(self.predict_rows, torch.tensor([start, end])).tolist()
        own = ((self.state_ids >= first) & (self.state_ids < last)).nonzero()[:, 0]
        return replace(
            self,
            input_ids=self.input_ids[start:end],
            position_ids=self.position_ids[start:end],
            predict_rows=self.predict_rows[first:last] - start,
            state_ids=self.state_ids[own] - first,
            context=context,
            own=own,
        )

    def of_own(self, numbers: Tensor) -> Tensor:
        """Return those of the numbers [N] that belong to the M trained tokens which are predicted on this rank."""
        return numbers if self.own is None else numbers.index_select(0, self.own)

    def pinned(self) -> MicroBatch:
        """Return a copy in memory that a CUDA device can read while the host continues."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``. The host does not wait for it to arrive, if this one is pinned."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a copy with every tensor changed; the layout must not be that of trees on a CPU."""
        assert not isinstance(self.layout, AttentionLayout), "the layout of a CPU stays there"
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {name: change(x) for name, x in values.items() if isinstance(x, Tensor)}
        segments = self.segments and self.segments.each(change)
        return replace(self, **tensors, layout=self.layout.each(change), segments=segments)


def pack(
    pieces: Sequence[TrainingGroup],
    order: Order = AttentionLayout,
    context: Context = ALONE,
) -> MicroBatch:
    """Pack pieces into one micro-batch on the CPU; no pieces give a filler of one token whose loss is 0.

    Args:
        pieces: groups, or pieces of groups.
        order: how the micro-batch says which tokens see which.
        context: the rank whose part of the micro-batch to return.
    """
    is_filler = not pieces
    if is_filler:
        pieces = [FILLER]
    trees = _Trees(order.row_length(sum(piece.tokens for piece in pieces), context.size))
    predicting = np.concatenate([rows for piece in pieces for rows in trees.add(piece)])
    predict_rows, state_ids = torch.from_numpy(predicting).unique(return_inverse=True)
    sequences = [sequence for piece in pieces for sequence in piece.sequences]
    groups = [piece for piece in pieces for _ in piece.sequences]
    lengths = torch.tensor([s.trained_tokens for s in sequences])
    ends = torch.from_numpy(trees.ends)
    whole = MicroBatch(
        input_ids=torch.from_numpy(trees.ids),
        position_ids=torch.from_numpy(trees.depths),
        layout=order.of(ends),
        segments=None if order is PathRows else Segments.of(ends),
        predict_rows=predict_rows,
        state_ids=state_ids,
        targets=_per_token(sequences, "completion_ids", np.int64),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(lengths),
        behaviour_logprobs=_per_token(sequences, "logprobs"),
        advantages=_per_token(sequences, "advantages"),
        old_values=_per_token(sequences, VALUES),
        returns=_per_token(sequences, RETURNS),
        teacher_logprobs=_per_token(sequences, TEACHER, missing=np.nan),
        teacher_baselines=_per_token(sequences, BASELINE),
        group_tokens=torch.tensor([g.cut_from or g.trained_tokens for g in groups]).repeat_interleave(lengths),
        weights=torch.tensor([group.weight for group in groups]).repeat_interleave(lengths),
        is_replayed=torch.tensor([group.is_replayed for group in groups]).repeat_interleave(lengths),
        n_replayed=sum(s.trained_tokens for s, group in zip(sequences, groups, strict=True) if group.is_replayed),
        n_sequences=len(sequences),
        sources=tuple(group.source for group in groups),
        is_filler=is_filler,
    )
    return whole.part(context)


def _per_token(sequences: Sequence[TokenSequence], name: str, dtype: Any = np.float32, *, missing: float = 0) -> Tensor:
    """Return the numbers [N] of a name of the trained tokens; ``missing`` for a completion without such numbers."""
    parts = [
        np.full(s.trained_tokens, missing, dtype)
        if (x := s.per_token.get(name)) is None
        else s.trained(x).astype(dtype)
        for s in sequences
    ]
    return torch.from_numpy(np.concatenate(parts))


class _Trees:
    """Tokens in depth-first order, with their depths, and the packed index at which the subtree of each ends.

    The rest of the row is padding: a tree of tokens 0, which no other token sees.
    """

    def __init__(self, length: int) -> None:
        self.ids, self.depths = np.zeros(length, np.int64), np.zeros(length, np.int64)
        self.ends = np.full(length, length)
        self._used = 0

    def add(self, group: TrainingGroup) -> list[Rows]:
        """Append a group's tokens; return the packed indices that predict the trained tokens, by completion."""
        n_prompt = len(group.prompt_ids)
        predicting = [np.empty(0, np.int64)] * len(group.sequences)
        path = predicting[0]
        for branch in group.branches:
            self.ends[path[branch.shared :]] = self._used
            new = slice(self._used, self._used + branch.new)
            self._used = new.stop
            path = np.concatenate([path[: branch.shared], np.arange(new.start, new.stop)])
            self.ids[new] = np.concatenate([group.prompt_ids, read_ids(branch.sequence)])[branch.shared :]
            self.depths[new] = np.arange(branch.shared, branch.length)
            rows = path[n_prompt - 1 : n_prompt - 1 + branch.sequence.tokens]
            predicting[branch.index] = branch.sequence.trained(rows)
        self.ends[path] = self._used
        return predicting


def read_ids(sequence: TokenSequence) -> Ids:
    """Return the tokens that a forward pass reads: all but the last, from which nothing is predicted."""
    return sequence.completion_ids[:-1]


def _common(first: Ids, second: Ids) -> int:
    """Return the length of the longest common prefix."""
    least = min(len(first), len(second))
    differs = first[:least] != second[:least]
    return int(differs.argmax()) if differs.any() else least
