"""Digests of tensors, by which a trainer and an engine find out whether they have the same weights.

A digest is the CRC-32 of a tensor's bytes. An engine may compute in a wider type than the published one, so values that
bfloat16 holds exactly are always hashed in bfloat16.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """Return the digest of a tensor of floats, 8 hexadecimal digits; the same for equal values of another float type.

    Args:
        tensor: of any shape, on any device.
    """
    values = tensor.detach()
    if values.dtype is not torch.bfloat16:
        short = values.to(torch.bfloat16)
        values = short if torch.equal(short.to(values.dtype), values) else values.float()
    content = values.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
    return f"{zlib.crc32(content):08x}"


def published_digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[str]]:
    """Return by name the digest of each published tensor, and of its value rounded to bfloat16 where that differs."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors:
        each = [digest(tensor)]
        if tensor.dtype is not torch.bfloat16:
            each.append(digest(tensor.to(torch.bfloat16)))
        found[name] = list(dict.fromkeys(each))
    return found
