"""The explanation of a step: what each group, completion and token contributed to its update, and what that did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.core.errors import ConfigurationError
from services.protocol.groups import TokenSequence
from trainer.algorithm.loss import CLIP_FRACTIONS, Diagnostics, PolicyLoss, StepSize
from trainer.algorithm.packing import MicroBatch, TrainingGroup
from trainer.algorithm.policy_losses import CAPS
from trainer.algorithm.training_groups import PerToken
from trainer.model.learner import Learner
from trainer.model.micro_batching import in_waves, part_order, unknown_ids
from trainer.model.ranks import Ranks
from trainer.recompute import Compared, Recomputation, checkpoints
from trainer.reporting.group_records import StepHead
from trainer.reporting.run_files import SampleRecords

RATIOS, CONTEXT = 12, 24
"""The largest ratios that an explanation has, and the tokens before each that it shows."""
TEXT = 300
"""Most characters of a prompt or completion in an explanation."""
Silence = Counter[str]
"""Trained tokens of an update by what the loss did to them; a token counts once for each optimizer step.

``tokens`` are all of them. Without a gradient are those of ``clip``, whose ratio is outside the bounds of LOSS, of
``cap``, which IMPORTANCE_CORRECTION rejects, and of ``mask``, whose completion OFF_POLICY_MAX_KL leaves out. A clip or
IMPORTANCE_CAP bounds the gradient of ``bounded`` ones.
"""
Decode = Callable[[list[int]], str]


@dataclass
class CompletionReport:
    """A completion: its reward, and its log-probability before and after the update."""

    reward: float | None
    advantage: float
    """The mean over its trained tokens."""
    tokens: int
    before: float
    """The sum over the trained tokens under the weights before the update, at TEMPERATURE."""
    after: float
    silence: Silence
    text: str


@dataclass
class GroupReport:
    """A group: its gradient, the versions that sampled it, and its completions."""

    group_id: str
    source: str
    prompt: str
    is_replayed: bool
    weight: float
    versions: dict[int, int]
    """Trained tokens by the policy version that sampled them."""
    grad_norm: float
    """The norm of its part of the gradient, at the weights before the update."""
    share: float
    """The projection of this part on the whole gradient; the shares of all groups sum to 1."""
    completions: list[CompletionReport]


@dataclass
class Ratio:
    """A trained token whose probability before the update differs much from that with which it was sampled."""

    ratio: float
    group_id: str
    completion: int
    place: int
    """The place of the token in its completion."""
    version: int
    before: str
    """The text before the token."""
    token: str


@dataclass
class Explanation:
    """A step, explained."""

    run: str
    step: int
    policy_version: int
    compared: Compared
    metrics: dict[str, float]
    """The metrics of the update, as they were computed now."""
    max_grad_norm: float
    loss: str
    silence: Silence
    without_advantage: int
    """Trained tokens whose advantage is 0."""
    versions: dict[int, int]
    groups: list[GroupReport]
    """The largest gradient first."""
    ratios: list[Ratio]


class WatchedLoss:
    """A loss that notes, pass by pass, what it does to the tokens of each completion; in place of a learner's."""

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss = loss
        self.teacher_coef = loss.teacher_coef
        self.passes: list[list[Silence]] = []

    def __call__(
        self, batch: MicroBatch, logprobs: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Diagnostics]:
        """Return what the loss returns."""
        theta = logprobs.detach().requires_grad_()
        policy = self.loss.corrected_loss(batch, theta, named.get("proximal_logprobs"))
        gradient = torch.autograd.grad(policy.losses.sum(), theta, allow_unused=True)[0]
        is_silent = (batch.advantages != 0) & (True if gradient is None else gradient == 0)
        none = torch.zeros_like(is_silent)
        cap = CAPS[self.loss.correction] if self.loss.importance_cap is None else self.loss.importance_cap
        weights = policy.metrics["importance_weight"]
        is_masked = is_silent & policy.metrics.get("off_policy_fraction", none).bool()
        is_capped = is_silent & ~is_masked & (weights == 0)
        is_limited = weights >= cap
        for name in CLIP_FRACTIONS:
            is_limited = is_limited | policy.metrics.get(name, none).bool()
        kinds = {
            "tokens": torch.ones_like(is_silent),
            "clip": is_silent & ~is_masked & ~is_capped,
            "cap": is_capped,
            "mask": is_masked,
            "bounded": ~is_silent & is_limited & (batch.advantages != 0),
        }
        counts = {n: batch.sequence_ids[k].bincount(minlength=batch.n_sequences).tolist() for n, k in kinds.items()}
        self.passes.append([Counter({n: c[i] for n, c in counts.items()}) for i in range(batch.n_sequences)])
        return self.loss(batch, logprobs, *arguments, **named)


def explain(run_dir: Path, step: int, ranks: Ranks) -> Explanation:
    """Take a step of a run again and explain it. A collective of all ranks.

    Raises:
        ConfigurationError: records or checkpoints that it needs are gone or damaged.
    """
    compared = Compared(first=1 + max(number for number in checkpoints(run_dir) if number < step), last=step)
    run = Recomputation(run_dir, compared, ranks)
    learner, loss = run.learner, run.learner.loss
    if not isinstance(loss, PolicyLoss):
        raise ConfigurationError(
            f"{run_dir.name} is of METHOD=sft, whose loss has no ratios and advantages to explain; compare its steps "
            "with their records alone"
        )
    while run.step < step - 1:
        run.take(*run.groups())
    head, groups = run.groups()
    before, gradients = learner.logprobs(groups), _gradients(learner, groups)
    learner.loss = watched = WatchedLoss(loss)  # type: ignore[assignment]
    result = run.take(head, groups)
    learner.loss = loss
    silences, after = _silences(learner, groups, watched, head), learner.logprobs(groups)
    run.compare()
    silence: Silence = Counter()
    for one in chain(*silences):
        silence.update(one)  # a sum would leave out what is 0
    decode: Decode = learner.policy.description.decode if learner.policy.description else lambda _ids: ""
    reports = [
        _group_report(group, gradients.get(id(group), (0.0, 0.0)), of_loss, then, now, decode)
        for group, of_loss, then, now in zip(groups, silences, before, after, strict=True)
    ]
    return Explanation(
        run=run_dir.name,
        step=step,
        policy_version=head.policy_version,
        compared=compared,
        metrics=result.metrics,
        max_grad_norm=run.settings.max_grad_norm,
        loss=run.settings.loss,
        silence=silence,
        without_advantage=sum(_without_advantage(s) for group in groups for s in group.sequences),
        versions=_versions(groups),
        groups=sorted(reports, key=lambda report: -report.grad_norm),
        ratios=_largest_ratios(groups, before, decode),
    )


def verify(run_dir: Path, ranks: Ranks) -> list[Compared]:
    """Compute every step again that led from a checkpoint to the next one, and compare. A collective of all ranks."""
    return [_compare_between(run_dir, first, last, ranks) for first, last in pairwise(checkpoints(run_dir))]


def _compare_between(run_dir: Path, first: int, last: int, ranks: Ranks) -> Compared:
    compared = Compared(first=first + 1, last=last)
    try:
        run = Recomputation(run_dir, compared, ranks)
        while run.step < last:
            run.take(*run.groups())
        run.compare()
    except ConfigurationError as error:
        compared.reason = str(error)
    return compared


def _gradients(learner: Learner, groups: Sequence[TrainingGroup]) -> dict[int, tuple[float, float]]:
    """Return the norm of each group's gradient at the present weights, and its share, by the group's ``id``."""
    known = [group for group in groups if not len(unknown_ids(group, learner.policy.config.vocab_size))]
    sizes: dict[int, StepSize] = {}
    for share in learner.shares(known):
        part = learner.part(share)
        sizes |= {id(group): part.size for group in share}
        learner.add_gradients(part, part.size)
    whole, of_groups = _taken_gradients(learner), {}
    squares = _dot(whole, whole)
    for group in known:
        learner.add_gradients(learner.part([group]), sizes.get(id(group), StepSize(0, 0)))
        own = _taken_gradients(learner)
        of_groups[id(group)] = (_dot(own, own) ** 0.5, _dot(own, whole) / squares if squares else 0.0)
    return of_groups


def _taken_gradients(learner: Learner) -> list[Tensor | None]:
    """Return the gradients of all trained parameters, and leave none."""
    gradients = [p.grad for group in learner.optimizer.param_groups for p in group["params"]]
    learner.optimizer.zero_grad()
    return gradients


def _dot(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    products = [
        (a.double() * b.double()).sum() for a, b in zip(first, second, strict=True) if a is not None and b is not None
    ]
    return sum(float(p.full_tensor() if isinstance(p, DTensor) else p) for p in products)


def _silences(
    learner: Learner, groups: Sequence[TrainingGroup], watched: WatchedLoss, head: StepHead
) -> list[list[Silence]]:
    """Return what the loss did to the tokens of each completion, by group, over all ranks."""
    known = [group for group in groups if not len(unknown_ids(group, learner.policy.config.vocab_size))]
    parts = [learner.part(share) for share in learner.shares(known)]
    parts = [parts[i] for i in part_order(learner.settings, head.step - 1)]
    if head.waves:
        parts = [learner.wave_part(wave)[0] for wave in in_waves(groups, head.waves)]
    batches = [pieces for part in parts for pieces in part.micro_batches]
    places = {id(s): (g, n) for g, group in enumerate(groups) for n, s in enumerate(group.sequences)}
    found: list[list[Silence]] = [[Counter() for _ in group.sequences] for group in groups]
    mine = [
        (*places[id(sequence)], silence)
        # A shared critic that trains alone leaves the policy's loss without a pass.
        for pieces, silences in zip(batches, watched.passes, strict=False)
        for sequence, silence in zip((s for piece in pieces for s in piece.sequences), silences, strict=bool(pieces))
    ]
    # Every rank of a context group has the same.
    for g, n, counts in chain(*learner.ranks.gather_json(mine)[:: learner.ranks.context.size]):
        found[g][n].update(counts)
    return found


def _without_advantage(sequence: TokenSequence) -> int:
    """Return the trained tokens of a completion whose advantage is 0."""
    advantages = sequence.advantages
    return sequence.trained_tokens if advantages is None else int((sequence.trained(advantages) == 0).sum())


def _versions(groups: Sequence[TrainingGroup]) -> dict[int, int]:
    counts = Counter(v for g in groups for s in g.sequences for v in s.trained(s.policy_versions).tolist())
    return dict(sorted(counts.items()))


def _group_report(
    group: TrainingGroup,
    gradient: tuple[float, float],
    silences: Sequence[Silence],
    before: PerToken,
    after: PerToken,
    decode: Decode,
) -> GroupReport:
    completions = [
        CompletionReport(
            reward=s.reward,
            advantage=0.0 if s.advantages is None or not s.trained_tokens else float(s.trained(s.advantages).mean()),
            tokens=s.trained_tokens,
            before=float(before[n].sum()),
            after=float(after[n].sum()),
            silence=silences[n],
            text=_short(s.completion or decode(s.completion_ids.tolist())),
        )
        for n, s in enumerate(group.sequences)
    ]
    return GroupReport(
        group_id=group.group_id,
        source=group.source,
        prompt=_short(decode(group.prompt_ids)),
        is_replayed=group.is_replayed,
        weight=group.weight,
        versions=_versions([group]),
        grad_norm=gradient[0],
        share=gradient[1],
        completions=completions,
    )


def _largest_ratios(groups: Sequence[TrainingGroup], before: Sequence[PerToken], decode: Decode) -> list[Ratio]:
    """Return the tokens with the largest distance of the policy from the one that sampled, the largest first."""
    found: list[tuple[float, TrainingGroup, int, int]] = []
    for group, of_group in zip(groups, before, strict=True):
        for number, (sequence, logprobs) in enumerate(zip(group.sequences, of_group, strict=True)):
            distances = logprobs - sequence.trained(sequence.logprobs)
            places = sequence.mask.nonzero()[0]
            found += [(float(d), group, number, int(p)) for d, p in zip(distances, places, strict=True)]
    texts = SampleRecords(decode)
    ratios: dict[bytes, Ratio] = {}
    for distance, group, number, place in sorted(found, key=lambda one: -abs(one[0])):
        if len(ratios) == RATIOS:
            break
        sequence = group.sequences[number]
        # Completions that begin with the same tokens have the same ratio there.
        key = group.group_id.encode() + sequence.completion_ids[: place + 1].tobytes()
        if key not in ratios:
            ids = [*group.prompt_ids, *sequence.completion_ids[:place].tolist()]
            ratio, version = float(torch.tensor(distance).exp()), int(sequence.policy_versions[place])
            [token] = texts.token_texts([int(sequence.completion_ids[place])])
            ratios[key] = Ratio(ratio, group.group_id, number, place, version, decode(ids[-CONTEXT:]), token)
    return [*ratios.values()]


def _short(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"
