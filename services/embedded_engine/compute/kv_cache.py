"""The key-value cache: keys and values of the running sequences, in one block of bounded memory.

Running sequences occupy rows 0 to B - 1, without holes, so that one batched product covers them all. Every row has
room for the longest running sequence; the block is divided into other rows when that length changes. So a token costs
the same memory whether few long sequences run or many short ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.embedded_engine.compute.attention import round_up
from services.embedded_engine.compute.weights import Architecture

ROW_STEP = 64
"""Row lengths are multiples of this."""


class KVCache:
    """Rows of keys and values. On a CPU the system assigns the memory only as rows are written."""

    def __init__(
        self, architecture: Architecture, max_tokens: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.num_heads, self.head_dim = architecture.num_kv_heads, architecture.head_dim
        self.num_layers = architecture.num_layers
        self._dtype, self._device = dtype, device
        self.row_length = 0
        self.rows = 0
        self.occupy(has_memory=True)

    @property
    def has_memory(self) -> bool:
        """False once the memory was given away."""
        return self._memory.numel() > 0

    def occupy(self, *, has_memory: bool) -> None:
        """Take the block of memory, or give it away while no sequence runs."""
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

    def capacity(self, length: int) -> int:
        """Return the number of sequences of up to ``length`` tokens that fit at once."""
        return min(self.max_rows, self.max_tokens // min(round_up(length, ROW_STEP), self.max_tokens))

    def ensure(self, length: int, used_rows: int, used_length: int) -> None:
        """Make rows of ``length`` tokens, keeping the first ``used_length`` tokens of the first ``used_rows`` rows.

        Rows shrink only when none is in use, because the rows in use must be copied.
        """
        wanted = min(round_up(length, ROW_STEP), self.max_tokens)
        if wanted == self.row_length or (wanted < self.row_length and used_rows):
            return
        old = [(self.keys[i], self.values[i]) for i in range(self.num_layers)]
        kept = []
        if used_rows:
            kept = [tuple(side[:used_rows, :, :used_length].clone() for side in pair) for pair in old]
        self._divide(wanted)
        for layer, pair in enumerate(kept):
            for side, content in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                side[:used_rows, :, :used_length] = content

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first ``length`` tokens onto another row."""
        self._view[:, :, target, :, :length] = self._view[:, :, source, :, :length]

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """Return a copy of the keys and values of some of a row's tokens, [2, layers, heads, tokens, head dim]."""
        return self._view[:, :, row, :, start:stop].clone()

    def write(self, rows: slice, content: Tensor) -> None:
        """Write keys and values, as returned by ``read``, into each of ``rows``."""
        self._view[:, :, rows, :, : content.shape[3]] = content.unsqueeze(2)

    def clear(self) -> None:
        """Overwrite everything with zeros, because even masked values spoil results when they are not finite."""
        self._memory.zero_()

    def _divide(self, length: int) -> None:
        self.row_length = length
        self.rows = self.max_tokens // length
        used = self.rows * self.num_heads * length * self.head_dim
        self._view = self._memory[:, :, :used].view(
            2, self.num_layers, self.rows, self.num_heads, length, self.head_dim
        )
        self.keys = list(self._view[0].unbind(0))
        self.values = list(self._view[1].unbind(0))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, because masked values are multiplied by 0 and must not be NaN. On a CPU they take no memory yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy gets zeroed pages from the system as they are touched.
    same_size = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, same_size)).view(dtype)
