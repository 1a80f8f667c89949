"""Seeded sampling and log-probabilities of a batch.

Each draw takes one uniform number, which depends on the request's seed, the completion's number within the request and
the token's position only, and finds its token on the cumulative distribution. So a completion does not depend on the
rest of the batch, and repeats with its seed. Sums of blocks keep a draw to three passes over the logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 512
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one sequence. ``key`` is the stream of its uniform numbers; see ``stream_key``."""

    key: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def is_truncated(self) -> bool:
        """Return True when top-k, top-p or min-p cut off unlikely tokens."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


def stream_key(seed: int, completion: int) -> int:
    """Return the 64-bit key of a completion's uniform numbers, from the request's seed and the completion's number."""
    digest = hashlib.blake2b(f"{seed}/{completion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per key and position: SplitMix64 (Steele et al. 2014) at that place of the stream."""
    with np.errstate(over="ignore"):
        mixed = keys + (positions + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    shares: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return shares


class Sampler:
    """A sampler of a fixed list of sequences, one a row; a new one is made when the batch changes."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        self._keys = np.array([row.key for row in rows], dtype=np.uint64)
        # Greedy rows have the log-probabilities of temperature 1, as SGLang gives them.
        temperatures = [row.temperature or 1.0 for row in rows]
        self._temperatures: Tensor | None = None
        if any(temperature != 1.0 for temperature in temperatures):
            self._temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        greedy = [index for index, row in enumerate(rows) if row.is_greedy]
        truncated = [index for index, row in enumerate(rows) if row.is_truncated]
        self._all_greedy = len(greedy) == len(rows)
        self._greedy = torch.tensor(greedy, device=device) if greedy else None
        self._truncated = torch.tensor(truncated, device=device) if truncated else None
        self._top_p = torch.tensor([rows[index].top_p for index in truncated], device=device)[:, None]
        self._min_p = torch.tensor([rows[index].min_p for index in truncated], device=device)[:, None]
        ranks = [rows[index].top_k if rows[index].top_k > 0 else 2**31 - 1 for index in truncated]
        self._top_k = torch.tensor(ranks, device=device)[:, None]

    def sample(self, logits: Tensor, positions: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Draw a token for each row.

        Args:
            logits: [B, V] float32; they are divided by the temperature in place.
            positions: [B], the number of tokens that each completion has so far.

        Returns:
            Token ids [B] and their log-probabilities [B], of the temperature-scaled distribution before
            truncation. A row whose logits are not finite has a log-probability of NaN.
        """
        if self._temperatures is not None:
            logits /= self._temperatures
        peak = logits.amax(-1, keepdim=True)
        weights = (logits - peak).exp_()
        sums = _block_sums(weights)
        total = sums.sum(-1)
        if self._all_greedy:
            tokens = logits.argmax(-1)
        else:
            drawn = torch.from_numpy(uniforms(self._keys, positions)).to(logits.device)
            tokens = _draw(weights, sums, drawn)
            if self._greedy is not None:
                tokens[self._greedy] = logits[self._greedy].argmax(-1)
            if self._truncated is not None:
                tokens[self._truncated] = self._draw_truncated(
                    weights[self._truncated], total[self._truncated], drawn[self._truncated]
                )
        chosen = logits.gather(1, tokens[:, None]) - peak
        return tokens, (chosen[:, 0].double() - total.log()).float()

    def _draw_truncated(self, weights: Tensor, total: Tensor, drawn: Tensor) -> Tensor:
        """Draw from the tokens that top-k, top-p and min-p leave, applied together as in SGLang."""
        ranked, order = weights.sort(stable=True, dim=-1, descending=True)
        cumulative = ranked.double().cumsum(-1)
        ranks = torch.arange(ranked.shape[1], device=ranked.device)
        before = cumulative - ranked
        is_left = (ranks < self._top_k) & (before <= self._top_p * total[:, None]) & (ranked >= self._min_p)
        is_left[:, 0] = True
        remaining = torch.where(is_left, ranked, 0.0)
        places = _draw(remaining, _block_sums(remaining), drawn)
        return order.gather(1, places[:, None]).squeeze(1)


def _block_sums(weights: Tensor) -> Tensor:
    """Return sums of blocks of BLOCK weights, [B, blocks] in float64; the last block may be shorter."""
    size = weights.shape[1]
    whole = size // BLOCK * BLOCK
    parts = [weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)] if whole else []
    if whole < size:
        parts.append(weights[:, whole:].sum(-1, keepdim=True))
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).double()


def _draw(weights: Tensor, sums: Tensor, drawn: Tensor) -> Tensor:
    """Return where ``drawn`` in [0, 1) [B] falls on the cumulative weights [B, V]; never on a weight of 0."""
    cumulative = sums.cumsum(-1)
    target = (drawn * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    # The place within the block as a share of it, so that the block's own sum decides and not the rounding of `sums`.
    block_sum = sums.gather(1, block)
    share = (target - (cumulative.gather(1, block) - block_sum)) / block_sum
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    is_inside = places < weights.shape[1]
    inner = torch.where(is_inside, weights.gather(1, places.clamp(max=weights.shape[1] - 1)), 0.0).double().cumsum(-1)
    end = inner[:, -1:]
    within = torch.minimum(share.clamp_(min=0.0) * end, torch.nextafter(end, torch.zeros_like(end)))
    place = torch.searchsorted(inner, within, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + place)[:, 0].clamp_(max=weights.shape[1] - 1)


def log_softmax_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities [N] of ``tokens`` [N] under ``logits`` [N, V], at temperature 1."""
    return logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, -1)


def top_logprobs(logits: Tensor, count: int) -> list[tuple[float, int]]:
    """Return the likeliest tokens of ``logits`` [V], each behind its log-probability."""
    values, tokens = (logits - torch.logsumexp(logits, -1)).topk(min(count, len(logits)))
    return list(zip(values.tolist(), tokens.tolist(), strict=True))
