"""Causal attention that gives a token the same result to the bit, however many tokens are computed with it.

A prompt's keys and values then equal those of the same tokens computed one by one, so a conversation can continue on
what its completions left in the cache. Two properties of matrix products stand in the way. Long sums are split by their
length, so values are summed CHUNK by CHUNK. And a product of one token's rows may be computed by another kernel than
one of many tokens' rows; where ``joins_rows`` finds that, each token of a prompt has a product of its own.

Shapes: n tokens; Q query heads in K key-value heads of G = Q / K; L keys; D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 32
"""Keys are read up to a multiple of this, and the rest is masked."""
CHUNK = 128
"""Values summed by one product."""
TOKENS = 64
"""Tokens of a prompt whose scores are computed at once."""


def round_up(length: int, step: int = STEP) -> int:
    """Return ``length``, rounded up to a multiple of ``step``."""
    return -(-length // step) * step


def causal_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return a mask [..., length] of 0 at the places up to each of ``positions`` [...] and -inf after it."""
    return torch.where(torch.arange(length, device=positions.device) <= positions[..., None], 0.0, -torch.inf).to(dtype)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return softmax(scale * query keys^T + mask) values.

    Args:
        query: [B, M, D].
        keys: [B, L, D].
        values: [B, L, D], finite where masked.
        mask: [B, M, L].
        scale: factor of the scores.

    Returns:
        [B, M, D].
    """
    if keys.dtype is torch.bfloat16 and keys.device.type == "cpu":
        # oneDNN reads the transpose of contiguous keys as it is, but copies that of others number by number.
        keys = keys.contiguous()
    weights = torch.softmax(torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale), -1)
    if keys.shape[1] <= CHUNK:
        return torch.bmm(weights, values)
    total = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for part, chunk in zip(weights.split(CHUNK, 2), values.split(CHUNK, 1), strict=True):
        total += torch.bmm(part, chunk)
    return total.to(query.dtype)


def attend_causally(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, *, joins: bool) -> Tensor:
    """Return the attention [n, Q, D] of a sequence's tokens from ``start`` on to all tokens up to themselves.

    Args:
        query: [n, Q, D].
        keys: of the whole sequence, [K, L, D], L a multiple of STEP and at least ``start`` + n.
        values: [K, L, D].
        start: position of the first query.
        scale: factor of the scores.
        joins: whether tokens may share a product.
    """
    (count, num_queries, head_dim), kv_heads = query.shape, len(keys)
    groups = num_queries // kv_heads
    grouped = query.reshape(count, kv_heads, groups, head_dim).transpose(0, 1).contiguous()
    attended = torch.empty_like(grouped)
    for first in range(0, count, TOKENS):
        part = slice(first, min(first + TOKENS, count))
        length = round_up(start + part.stop)
        positions = torch.arange(start + first, start + part.stop, device=query.device)
        mask = causal_mask(positions, length, query.dtype)[:, None].expand(-1, groups, -1)
        seen_keys, seen_values = keys[:, :length], values[:, :length]
        if joins:
            rows = mask.flatten(0, 1).expand(kv_heads, -1, -1)
            result = attend(grouped[:, part].flatten(1, 2), seen_keys, seen_values, rows, scale)
            attended[:, part] = result.view_as(attended[:, part])
            continue
        for head in range(kv_heads):
            own_keys, own_values = (side[head].expand(len(positions), -1, -1) for side in (seen_keys, seen_values))
            attended[head, part] = attend(grouped[head, part], own_keys, own_values, mask, scale)
    return attended.transpose(0, 1).reshape(count, num_queries, head_dim)


def joins_rows(groups: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of one token's rows and of many tokens' rows are equal to the bit on this processor."""
    if device.type != "cpu":
        # Other devices choose kernels by all sizes; there, a continued conversation is equal up to rounding.
        return True
    generator = torch.Generator().manual_seed(0)
    tokens, length = TOKENS + 1, 3 * CHUNK + STEP
    query = torch.randn(tokens, groups, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, length, head_dim, generator=generator).to(dtype)
    for start in (0, length - tokens):
        joined, apart = (
            attend_causally(query, keys, values, start, head_dim**-0.5, joins=joins) for joins in (True, False)
        )
        if not torch.equal(joined, apart):
            return False
    return True
