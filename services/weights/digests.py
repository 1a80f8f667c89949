"""Digests of tensors, by which a trainer and an engine find out whether they have the same weights.

A digest is the XXH3 hash of a tensor's bytes, at a sixth of the cost of a CRC-32. An engine may compute in a wider type
than the published one, so values that bfloat16 holds exactly are always hashed in bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

THREADS = 16
"""Most threads that compute digests."""
BLOCK = 1 << 16
"""Numbers that are narrowed at a time."""


def digest(tensor: Tensor) -> str:
    """Return the digest of a tensor of floats, 16 hexadecimal digits; the same for equal values of another float type.

    Args:
        tensor: of any shape, on any device.
    """
    values = tensor.detach().reshape(-1).cpu()
    if values.dtype is torch.bfloat16:
        return xxh3_64_hexdigest(values.view(torch.uint8).numpy().data)
    bits = values.float().numpy().view(np.uint32)
    # bfloat16 holds the upper half of some numbers. Blocks fit into the processor's cache, so that each is read once.
    narrow = xxh3_64()
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        if np.bitwise_or.reduce(block) & 0xFFFF:
            return xxh3_64_hexdigest(bits.data)
        narrow.update((block >> 16).astype(np.uint16).data)
    return narrow.hexdigest()


def published_digests(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return by name the digest of each published tensor, and of its value rounded to bfloat16 where that differs."""

    def of_both(tensor: Tensor) -> list[str]:
        shorter = [] if tensor.dtype is torch.bfloat16 else [digest(tensor.to(torch.bfloat16))]
        return list(dict.fromkeys([digest(tensor), *shorter]))

    # A hash holds no lock of Python's, and one thread would make workers of large models wait.
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "digests") as pool:
        return dict(zip(tensors, pool.map(of_both, tensors.values()), strict=True))
