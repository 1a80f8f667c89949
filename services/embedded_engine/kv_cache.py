"""The key-value cache of the running sequences, in one block of bounded memory, and the prefix cache of ended ones.

Running sequences occupy rows 0 to B - 1, without holes, so that one batched product covers them all. Every row has
room for the longest running sequence; the block is divided into other rows when that length changes. So a token costs
the same memory whether few long sequences run or many short ones.

The prefix cache keeps keys and values of conversations that may be continued, as a tree of runs of tokens. A node holds
those of some tokens that follow its parent's, and conversations that begin alike share the nodes of their beginning.
When the cache is full, the least recently used leaf is removed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.embedded_engine.weights import Architecture

STEP = 32
"""Keys are read up to a multiple of this, and the rest is masked."""
ROW_STEP = 64
"""Row lengths are multiples of this."""


def round_up(length: int, step: int = STEP) -> int:
    """Return ``length``, rounded up to a multiple of ``step``."""
    return -(-length // step) * step


class Prefixes:
    """The beginnings of prompts that are kept, of at most ``max_tokens`` tokens, apart by adapter."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.generation = 0
        """Grows when the cache is cleared: what was computed before that must not be inserted."""

    def clear(self) -> None:
        """Drop everything."""
        self.num_tokens = 0
        self.generation += 1


class Rows:
    """The cache of the running sequences, in rows without holes, for at most ``max_tokens`` tokens in all."""

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.row_length = 0
        """The tokens for which each row has room."""
        self.has_memory = True
        """False once the memory was given away."""

    def whole_length(self, length: int) -> int:
        """Return the length of rows for sequences of up to ``length`` tokens."""
        return min(round_up(length, ROW_STEP), self.max_tokens)

    def capacity(self, length: int) -> int:
        """Return the number of sequences of up to ``length`` tokens that fit at once."""
        return min(self.max_rows, self.max_tokens // self.whole_length(length))


class KVCache(Rows):
    """Rows of keys and values. On a CPU the system assigns the memory only as rows are written."""

    def __init__(
        self, architecture: Architecture, max_tokens: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(max_tokens, max_rows)
        self.prefixes = PrefixCache(max_tokens // 2)
        """The beginnings that ended sequences leave for those that continue them."""
        self.num_heads, self.head_dim = architecture.num_kv_heads, architecture.head_dim
        self.num_layers = architecture.num_layers
        self._dtype, self._device = dtype, device
        self.rows = 0
        self.occupy(has_memory=True)

    def occupy(self, *, has_memory: bool) -> None:
        """Take the memory, which is one block, or give it away while no sequence runs."""
        self.has_memory = has_memory
        self._memory = self._view = torch.empty(0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        if not has_memory:
            # A no-op where CUDA is not used.
            torch.cuda.empty_cache()
            return
        shape = (2, self.num_layers, self.max_tokens * self.num_heads * self.head_dim)
        self._memory = _zeros(shape, self._dtype, self._device)
        self._divide(min(ROW_STEP, self.max_tokens))

    def ensure(self, length: int, used_rows: int, used_length: int) -> None:
        """Make rows of ``length`` tokens, keeping the first ``used_length`` tokens of the first ``used_rows`` rows.

        Rows shrink only when none is in use, because the rows in use must be copied.
        """
        wanted = self.whole_length(length)
        if wanted == self.row_length or (wanted < self.row_length and used_rows):
            return
        used = self._view[:, :, :used_rows, :, :used_length].clone()
        self._divide(wanted)
        self._view[:, :, :used_rows, :, :used_length] = used

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first ``length`` tokens to the place of another row."""
        self._view[:, :, target, :, :length] = self._view[:, :, source, :, :length]

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """Return a copy of the keys and values of some of a row's tokens, [2, layers, heads, tokens, head dim]."""
        return self._view[:, :, row, :, start:stop].clone()

    def write(self, rows: slice, content: Tensor) -> None:
        """Write what ``read`` returned, into each of ``rows``."""
        self._view[:, :, rows, :, : content.shape[3]] = content.unsqueeze(2)

    def storer(self, rows: Sequence[slice]) -> Callable[[int, int, Tensor, Tensor], None]:
        """Return a function by which a model's prefill writes each of its sequences into one of ``rows``.

        It takes a layer, a sequence's number, and its keys and values in this layer, [K, tokens, D].
        """

        def store(layer: int, number: int, keys: Tensor, values: Tensor) -> None:
            if rows[number].stop > rows[number].start:
                self.keys[layer][rows[number], :, : keys.shape[1]] = keys
                self.values[layer][rows[number], :, : values.shape[1]] = values

        return store

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count`` rows, if that saves memory, which it does not here."""

    def clear(self) -> None:
        """Forget everything, because even masked values spoil results when they are not finite."""
        self._memory.zero_()

    def _divide(self, length: int) -> None:
        self.row_length = length
        self.rows = self.max_tokens // length
        used = self.rows * self.num_heads * length * self.head_dim
        self._view = self._memory[:, :, :used].view(
            2, self.num_layers, self.rows, self.num_heads, length, self.head_dim
        )
        self.keys, self.values = (list(side.unbind(0)) for side in self._view)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, because masked values are multiplied by 0 and must not be NaN. On a CPU they take no memory yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy gets zeroed pages from the system as they are touched.
    same_size = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, same_size)).view(dtype)


@dataclass(eq=False)
class Node:
    """A run of tokens with their keys and values, [2, layers, heads, tokens, head dim]."""

    tokens: Sequence[int]
    keys_values: Tensor
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """By their first token."""


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])


@dataclass(frozen=True)
class KeysValues:
    """Keys and values, [2, layers, heads, tokens, head dim], in parts to be concatenated."""

    parts: list[Tensor]

    @property
    def length(self) -> int:
        """The number of their tokens."""
        return sum(part.shape[3] for part in self.parts)


class PrefixCache(Prefixes):
    """Keys and values of ended sequences, as a tree."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._roots: dict[bool, Node] = {}
        # The least recently used first; parents come after their children.
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def clear(self) -> None:
        """Drop everything."""
        super().clear()
        self._roots.clear()
        self._nodes.clear()

    def find(self, use_adapter: bool, tokens: Sequence[int]) -> KeysValues:
        """Return what a model's prefill needs of the longest known beginning of ``tokens``.

        Its ``length`` is the number of tokens that need no prefill, all but one at most.
        """
        node, parts, length = self._root(use_adapter), [], 0
        while length < len(tokens) - 1 and (child := node.children.get(tokens[length])) is not None:
            common = common_length(child.tokens, tokens[length:-1])
            parts.append(child.keys_values[:, :, :, :common])
            node, length = child, length + common
            if common < len(child.tokens):
                break
        self._touch(node)
        return KeysValues(parts)

    def shared(self, tokens: Sequence[int], other: Sequence[int]) -> int:
        """Return how many of ``tokens`` are known once ``other`` has been computed."""
        return common_length(tokens[:-1], other)

    def insert(self, use_adapter: bool, tokens: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Keep what is cached of ``tokens``; ``read(start, stop)`` returns a copy for some of them."""
        node, length = self._root(use_adapter), 0
        while length < len(tokens) and (child := node.children.get(tokens[length])) is not None:
            common = common_length(child.tokens, tokens[length:])
            node, length = self._split(child, common), length + common
        if length < len(tokens):
            child = Node(tokens[length:], read(length, len(tokens)), node)
            self._add(child)
            node = child
        self._touch(node)
        while self.num_tokens > self.max_tokens:
            self._remove(next(iter(self._nodes)))

    def _root(self, use_adapter: bool) -> Node:
        return self._roots.setdefault(use_adapter, Node((), torch.empty(0), None))

    def _split(self, node: Node, length: int) -> Node:
        """Return a node of the first ``length`` tokens of ``node``: itself, or a new parent of the rest."""
        if length == len(node.tokens):
            return node
        assert node.parent is not None
        # Copies, because a part of a tensor keeps the whole in memory.
        start, rest = (part.clone() for part in node.keys_values.split([length, len(node.tokens) - length], 3))
        first = Node(node.tokens[:length], start, node.parent)
        self._add(first)
        self.num_tokens -= length
        node.tokens, node.keys_values, node.parent = node.tokens[length:], rest, first
        first.children[node.tokens[0]] = node
        return first

    def _add(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        self._nodes[node] = None
        self.num_tokens += len(node.tokens)

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.tokens[0]]
        del self._nodes[leaf]
        self.num_tokens -= len(leaf.tokens)

    def _touch(self, node: Node) -> None:
        """Make a node and its ancestors those that were used last."""
        while node.parent is not None:
            self._nodes.move_to_end(node)
            node = node.parent
