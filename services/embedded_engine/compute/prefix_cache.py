"""The prefix cache: keys and values of conversations that may be continued, as a tree of runs of tokens.

A node holds the keys and values of some tokens that follow its parent's, and conversations that begin alike share the
nodes of their beginning. When the cache is full, the leaf that was not used for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class Node:
    """A run of tokens with their keys and values, [2, layers, heads, tokens, head dim]."""

    tokens: Sequence[int]
    keys_values: Tensor | None
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """By their first token."""


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])


class PrefixCache:
    """Keys and values of at most ``max_tokens`` tokens, apart for requests with the adapter and without."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.generation = 0
        """Grows when the cache is cleared: keys and values computed before that must not be inserted."""
        self._roots: dict[bool, Node] = {}
        # From the one that was not used for longest; parents come after their children.
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def clear(self) -> None:
        """Drop everything."""
        self._roots.clear()
        self._nodes.clear()
        self.num_tokens = 0
        self.generation += 1

    def find(self, use_adapter: bool, tokens: Sequence[int]) -> list[Tensor]:
        """Return the keys and values of the longest known beginning of ``tokens``, in parts to be concatenated."""
        node, parts, length = self._root(use_adapter), [], 0
        while length < len(tokens) and (child := node.children.get(tokens[length])) is not None:
            common = common_length(child.tokens, tokens[length:])
            assert child.keys_values is not None
            parts.append(child.keys_values[:, :, :, :common])
            node, length = child, length + common
            if common < len(child.tokens):
                break
        self._touch(node)
        return parts

    def insert(self, use_adapter: bool, tokens: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Keep the keys and values of ``tokens``; ``read(start, stop)`` returns a copy of some of them."""
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
        return self._roots.setdefault(use_adapter, Node((), None, None))

    def _split(self, node: Node, length: int) -> Node:
        """Return a node of the first ``length`` tokens of ``node``: itself, or a new parent of the rest."""
        if length == len(node.tokens):
            return node
        assert node.parent is not None
        assert node.keys_values is not None
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
