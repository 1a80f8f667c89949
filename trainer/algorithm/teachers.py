"""Distillation: a policy learns from the probabilities that frozen teachers give to its own tokens.

The loss of a sampled token is in loss.py (``teacher_loss``). Sources: on-policy distillation (Agarwal et al. 2024,
arXiv:2306.13649).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from services.protocol.groups import TEACHER, Group, TokenSequence, by_episode
from trainer.algorithm.loss import KL_LIMIT, k3
from trainer.algorithm.packing import BASELINE, TrainingGroup
from trainer.algorithm.training_groups import Array, PerToken, scatter


def jensen_shannon(log_p: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the generalised Jensen-Shannon divergence of theta and a teacher over the vocabulary, and its gradient.

    With m = (1 - beta) p + beta t it is beta KL(t || m) + (1 - beta) KL(p || m); for beta 0 the forward KL(t || p), for
    beta 1 the reverse KL(p || t) (arXiv:2306.13649, eq. 1). Its derivative with respect to the logits is
    p (g - sum p g), where g = log p - log t for beta 1, else (1 - beta) (log p - log m); for beta 0 it is p - t.

    Args:
        log_p: [n, V], log-probabilities of theta.
        log_t: [n, V], those of the teacher.
        beta: from 0 to 1.

    Returns:
        The divergences [n] in nats, and their derivatives [n, V] with respect to theta's logits.
    """
    p, t = log_p.exp(), log_t.exp()
    if beta == 0:
        return (t * (log_t - log_p)).sum(1), p - t
    if beta == 1:
        g = log_p - log_t
        values = (p * g).sum(1)
    else:
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_t + math.log(beta))
        g = (1 - beta) * (log_p - log_m)
        values = beta * (t * (log_t - log_m)).sum(1) + (p * g).sum(1)
    return values, p * (g - (p * g).sum(1, keepdim=True))


def is_taught(sequence: TokenSequence) -> bool:
    """Return whether a teacher has scored a sequence."""
    return TEACHER in sequence.arrays


def with_teacher(group: Group, logprobs: PerToken) -> Group:
    """Return a group with a teacher's log-probabilities, of the trained tokens of each of its sequences."""
    pairs = zip(group.sequences, logprobs, strict=True)
    return group.model_copy(update={"sequences": [taught(s, scatter(s, numbers)) for s, numbers in pairs]})


def taught(sequence: TokenSequence, logprobs: Array) -> TokenSequence:
    """Return a sequence with a teacher's log-probabilities of all its L tokens."""
    return sequence.model_copy(update={"arrays": {**sequence.arrays, TEACHER: logprobs}})


def gaps(sequence: TokenSequence) -> Array:
    """Return log(pi_behaviour / pi_teacher) of a taught sequence's trained tokens, in nats.

    Its mean over sampled tokens estimates KL(behaviour || teacher) without bias (k1); a single one may be negative.
    """
    return sequence.trained(sequence.logprobs - sequence.arrays[TEACHER])


def mean_absolute_gap(group: TrainingGroup) -> float:
    """Return the mean of |gap| over the tokens that a teacher has scored; 0 without any."""
    of_sequences = [np.abs(gaps(s)) for s in group.sequences if is_taught(s)]
    numbers = np.concatenate([np.empty(0), *of_sequences])
    return float(numbers.mean()) if len(numbers) else 0.0


def with_baselines(groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
    """Return the groups of one source with the baseline of each taught sequence: the mean gap of all other episodes.

    The mean is over taught tokens, each gap bounded as in ``kl_penalty``; without others it is 0. No token changes the
    baseline of its own episode, so the expected gradient stays that of the distance. Where several seats are trained,
    a group counts as one episode, because the seats of a game read each other's tokens.

    Args:
        groups: all groups of the step, fresh and replayed, of a source, which has one teacher.
    """
    episodes = []
    for group in groups:
        several = len({s.seat for s in group.sequences}) > 1
        episodes += [group.sequences] if several else by_episode(group.sequences)
    taught_sequences = [[s for s in sequences if is_taught(s)] for sequences in episodes]
    numbers = [np.concatenate([np.empty(0), *map(gaps, of)]).clip(-KL_LIMIT, KL_LIMIT) for of in taught_sequences]
    sums = [float(of.sum()) for of in numbers]
    total, count = math.fsum(sums), sum(map(len, numbers))
    changed: dict[int, TokenSequence] = {}
    for sequences, own, of in zip(taught_sequences, sums, numbers, strict=True):
        mean = (total - own) / (count - len(of)) if count > len(of) else 0.0
        for s in sequences:
            arrays = {**s.arrays, BASELINE: np.full(s.tokens, mean)}
            changed[id(s)] = s.model_copy(update={"arrays": arrays})
    return [replace(group, sequences=[changed.get(id(s), s) for s in group.sequences]) for group in groups]


POSITIONS = (0, 16, 64, 256, 1024, 4096)
"""First places in a completion of the stretches whose distance from the teacher is reported by itself."""


def teacher_metrics(groups: Sequence[Group], teachers: Mapping[str, str]) -> dict[str, float]:
    """Return the distance from the teachers of the policy that sampled the groups, in nats a token.

    ``teacher_k1`` is the mean gap, an estimate of the reverse KL that may be negative, and ``teacher_k3`` another that
    is not. They are over all taught tokens, by source (``teacher_k1/maths``), by teacher where there are several
    (``teacher_k1_of_<teacher>``), and k1 by place in the completion (``teacher_k1_from_<place>``).
    ``teacher_missing`` counts sequences that no teacher has scored although their source has one.

    Args:
        groups: fresh groups of a step.
        teachers: the teacher of each source; "" for a source without one.
    """
    asked = [(group.prompt.source, s) for group in groups if teachers[group.prompt.source] for s in group.sequences]
    scored = [(source, s, gaps(s), s.trained(np.arange(s.tokens))) for source, s in asked if is_taught(s)]
    parts: dict[str, list[Array]] = {}
    for source, _, numbers, places in scored:
        several = len(set(teachers.values()) - {""}) > 1
        names = ["", *([f"/{source}"] if source else []), *([f"_of_{_short(teachers[source])}"] if several else [])]
        for name in names:
            parts.setdefault(name, []).append(numbers)
        for start, end in zip(POSITIONS, (*POSITIONS[1:], math.inf), strict=True):
            parts.setdefault(f"_from_{start}", []).append(numbers[(places >= start) & (places < end)])
    joined = {name: numbers for name, of in parts.items() if len(numbers := np.concatenate(of))}
    metrics = {f"teacher_k1{name}": float(numbers.mean()) for name, numbers in joined.items()}
    for name, numbers in joined.items():
        if not name.startswith("_from_"):
            d = torch.from_numpy(numbers)
            metrics[f"teacher_k3{name}"] = float(k3(d, torch.zeros_like(d)).mean())
    return metrics | ({"teacher_missing": float(len(asked) - len(scored))} if asked else {})


def _short(teacher: str) -> str:
    """Return the last part of a model's name or directory, or the host of a URL."""
    return teacher.rstrip("/").rpartition("/")[2]
