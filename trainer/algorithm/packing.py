"""Packing of groups into micro-batches: their tokens as trees in depth-first order, without padding.

The prompt and completions of a group are a prefix tree: equal tokens after equal tokens are one node, whether they are
the prompt, an episode's earlier turns, or what two completions happen to begin with. The nodes lie one after the other
in depth-first order, and the trees of a micro-batch in one row. A token sees the token at k before it as long as the
subtree of k has not ended. So every distinct token is computed once. The last token of a completion is not in the row,
unless another one goes on from it, because no token is predicted from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import compress, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithm.attention_layout import AttentionLayout, TreeMask

T = TypeVar("T")
Rows = NDArray[np.int64]
"""Packed indices."""


@dataclass(frozen=True)
class Turn:
    """A turn of an episode: completion tokens ``start`` to ``end``, and the reward that follows (see TurnReward)."""

    number: int
    start: int
    end: int
    reward: float


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
    turns: list[Turn] | None = None
    """The rewards of the model's turns; None where the episode has one reward alone."""
    seat: int | None = None
    """The seat of a game; None elsewhere."""

    def __post_init__(self) -> None:
        for name in ("behaviour_logprobs", "advantages", "loss_mask", "values", "returns"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.completion_ids):
                raise ValueError(
                    f"{len(self.completion_ids)} completion_ids but {len(values)} {name}: every completion token "
                    "needs one"
                )

    @property
    def rewarded_turns(self) -> list[Turn]:
        """The turns; without turns, the whole sequence as one turn with the episode's reward."""
        return self.turns or [Turn(0, 0, len(self.completion_ids), self.reward)]

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
class Branch:
    """A completion's way through its group's prefix tree, from the prompt's first token on."""

    sequence: TrainingSequence
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
    def branches(self) -> list[Branch]:
        """The completions in depth-first order of the group's prefix tree."""
        return self._branches

    # orjson writes all attributes of a dataclass whose names have no leading underscore, fields or not.
    @cached_property
    def _branches(self) -> list[Branch]:
        reads = [sequence.read_ids for sequence in self.sequences]
        order = sorted(range(len(reads)), key=reads.__getitem__)
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
        total = sum(abs(a) for sequence in self.sequences for a in sequence.trained(sequence.advantages))
        return total / max(self.trained_tokens, 1)

    def all_ids(self) -> Iterator[list[int]]:
        """Yield the token ids of the prompt, then those of each completion."""
        yield self.prompt_ids
        for sequence in self.sequences:
            yield sequence.completion_ids


@dataclass(frozen=True)
class MicroBatch:
    """T packed tokens of pieces with S completions, which have N trained tokens in all, predicted from U states."""

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64: the depth in the tree."""
    layout: AttentionLayout | TreeMask
    """The former for attention on a CPU, the latter on CUDA."""
    predict_rows: Tensor
    """[U] int64, ascending: the packed indices whose hidden states predict trained tokens."""
    state_ids: Tensor
    """[N] int64 in [0, U): which of the states predicts each trained token. Where completions part, one predicts
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
    weights: Tensor
    """[N] float32: the importance weight of the group at each token."""
    is_replayed: Tensor
    """[N] bool: the group came from the replay buffer."""
    n_replayed: int
    """Number of the N tokens that came from the replay buffer."""
    n_sequences: int
    is_filler: bool = False
    """True for a micro-batch without loss: its rank has none left, but must take part in the collectives."""

    def pinned(self) -> MicroBatch:
        """Return a copy in memory that a CUDA device can read while the host goes on."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``. The host does not wait for it to arrive, if this one is pinned."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a copy with every tensor changed; the layout must be a TreeMask."""
        assert isinstance(self.layout, TreeMask), "the layout of a CPU stays there"
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {name: change(x) for name, x in own.items() if isinstance(x, Tensor)}
        return replace(self, **tensors, layout=self.layout.each(change))


def pack(
    pieces: Sequence[TrainingGroup], order: type[AttentionLayout] | type[TreeMask] = AttentionLayout
) -> MicroBatch:
    """Pack pieces into one micro-batch on the CPU; no pieces give a filler of one token whose loss is 0.

    Args:
        pieces: groups, or pieces of groups.
        order: how the micro-batch says which tokens see which: for attention on a CPU, or on CUDA.
    """
    is_filler = not pieces
    if is_filler:
        pieces = [TrainingGroup([0], [TrainingSequence([0], [0.0], [0.0])], weight=0.0)]
    trees = _Trees(sum(piece.tokens for piece in pieces))
    predicting = np.concatenate([rows for piece in pieces for rows in trees.add(piece)])
    predict_rows, state_ids = torch.from_numpy(predicting).unique(return_inverse=True)
    sequences = [sequence for piece in pieces for sequence in piece.sequences]
    groups = [piece for piece in pieces for _ in piece.sequences]
    lengths = torch.tensor([s.trained_tokens for s in sequences])
    return MicroBatch(
        input_ids=torch.from_numpy(trees.ids),
        position_ids=torch.from_numpy(trees.depths),
        layout=order.of(torch.from_numpy(trees.ends)),
        predict_rows=predict_rows,
        state_ids=state_ids,
        targets=_per_token(sequences, [s.completion_ids for s in sequences], np.int64),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(lengths),
        behaviour_logprobs=_per_token(sequences, [s.behaviour_logprobs for s in sequences]),
        advantages=_per_token(sequences, [s.advantages for s in sequences]),
        old_values=_per_token(sequences, [s.values for s in sequences]),
        returns=_per_token(sequences, [s.returns for s in sequences]),
        weights=torch.tensor([group.weight for group in groups]).repeat_interleave(lengths),
        is_replayed=torch.tensor([group.is_replayed for group in groups]).repeat_interleave(lengths),
        n_replayed=sum(s.trained_tokens for s, group in zip(sequences, groups, strict=True) if group.is_replayed),
        n_sequences=len(sequences),
        is_filler=is_filler,
    )


def _per_token(
    sequences: Sequence[TrainingSequence], numbers: Sequence[Sequence[float] | None], dtype: Any = np.float32
) -> Tensor:
    """Return the numbers [N] of the trained tokens of completions; 0 for a completion without numbers."""
    parts = [
        np.zeros(s.trained_tokens, dtype) if own is None else np.array(s.trained(own), dtype)
        for s, own in zip(sequences, numbers, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


class _Trees:
    """Tokens in depth-first order, with their depths, and the packed index at which the subtree of each ends."""

    def __init__(self, tokens: int) -> None:
        self.ids, self.depths, self.ends = (np.empty(tokens, np.int64) for _ in range(3))
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
            self.ids[new] = [*group.prompt_ids, *branch.sequence.read_ids][branch.shared :]
            self.depths[new] = np.arange(branch.shared, branch.length)
            rows = path[n_prompt - 1 : n_prompt - 1 + len(branch.sequence.completion_ids)]
            mask = branch.sequence.loss_mask
            predicting[branch.index] = rows if mask is None else rows[np.array(mask, bool)]
        self.ends[path] = self._used
        return predicting


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    differs = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differs, min(len(first), len(second)))
