"""Digests of tensors, by which a trainer and an engine find out whether they have the same weights.

A digest is the CRC-32 of a tensor's bytes. An engine may compute in a wider type than the published one, so values that
bfloat16 holds exactly are always hashed in bfloat16.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

THREADS = 16
"""Most threads that compute digests."""
BLOCK = 1 << 16
"""Numbers that are narrowed at a time."""


def digest(tensor: Tensor) -> str:
    """Return the digest of a tensor of floats, 8 hexadecimal digits; the same for equal values of another float type.

    Args:
        tensor: of any shape, on any device.
    """
    values = tensor.detach().reshape(-1).cpu()
    if values.dtype is torch.bfloat16:
        return f"{zlib.crc32(values.view(torch.uint8).numpy().data):08x}"
    bits = values.float().numpy().view(np.uint32)
    if np.bitwise_or.reduce(bits) & 0xFFFF:
        return f"{zlib.crc32(bits.data):08x}"
    # bfloat16 holds the upper half of such numbers. They are hashed in blocks that the processor's cache holds.
    crc = 0
    for start in range(0, len(bits), BLOCK):
        crc = zlib.crc32((bits[start : start + BLOCK] >> 16).astype(np.uint16).data, crc)
    return f"{crc:08x}"


def published_digests(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return by name the digest of each published tensor, and of its value rounded to bfloat16 where that differs."""

    def of_both(tensor: Tensor) -> list[str]:
        shorter = [] if tensor.dtype is torch.bfloat16 else [digest(tensor.to(torch.bfloat16))]
        return list(dict.fromkeys([digest(tensor), *shorter]))

    # A CRC holds no lock of Python's, and 4 GB/s of one thread would make workers of large models wait.
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "digests") as pool:
        return dict(zip(tensors, pool.map(of_both, tensors.values()), strict=True))
