"""The explanation of a step: what each group, completion and token contributed to its update, and what that did.

``python -m trainer.explain NAME RUN STEP FILE`` is one rank of ``explain`` or ``verify``, as torchrun starts it; rank 0
writes the result to FILE as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.core import logs
from services.core.errors import ConfigurationError, exit_code_of
from trainer.__main__ import leave
from trainer.algorithm.loss import CLIP_FRACTIONS, Diagnostics, PolicyLoss, StepSize
from trainer.algorithm.packing import MicroBatch, TrainingGroup
from trainer.algorithm.policy_losses import CAPS
from trainer.algorithm.training_groups import PerToken
from trainer.model.learner import Learner
from trainer.model.micro_batching import part_order, unknown_ids
from trainer.model.ranks import Ranks, join_ranks
from trainer.recompute import Recomputation, Taken, checkpoints, computation
from trainer.reporting.explanations import (
    Compared,
    CompletionReport,
    Explanation,
    GroupReport,
    Ratio,
    Silence,
    SourceReport,
)
from trainer.reporting.samples import SampleRecords

RATIOS, CONTEXT = 12, 24
"""The largest ratios that an explanation has, and the tokens before each that it shows."""
TEXT = 300
"""Most characters of a prompt or completion in an explanation."""
Gradients = tuple[dict[int, tuple[float, float]], list[SourceReport]]
"""The norms and shares of the gradients of groups, by the group's ``id``, and those of sources."""


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
        self.passes.append([Silence(**{n: c[i] for n, c in counts.items()}) for i in range(batch.n_sequences)])
        return self.loss(batch, logprobs, *arguments, **named)


def explain(run_dir: Path, step: int, ranks: Ranks) -> Explanation:
    """Take a step of a run again and explain it. A collective of all ranks.

    Raises:
        ConfigurationError: records or checkpoints that it needs are gone or damaged.
    """
    compared = Compared(first=1 + max(number for number in checkpoints(run_dir) if number < step), last=step)
    run = _begin(compared, run_dir, ranks)
    if not isinstance(run.learner.loss, PolicyLoss):
        raise ConfigurationError(
            f"{run_dir.name} is of METHOD=sft, whose loss has no ratios and advantages to explain; compare its steps "
            "with their records alone"
        )
    while run.step < step - 1:
        _note(compared, run.take(*run.groups()))
    head, groups = run.groups()
    learner = run.learner
    before = learner.logprobs(groups)
    gradients, sources = _gradients(learner, groups)
    assert isinstance(learner.loss, PolicyLoss)
    learner.loss = watched = WatchedLoss(learner.loss)  # type: ignore[assignment]
    taken = run.take(head, groups)
    learner.loss = watched.loss
    silences = _silences(learner, groups, watched, step)
    after = learner.logprobs(groups)
    _note(compared, taken)
    _compare_checkpoint(compared, run)
    decode = learner.policy.description.decode if learner.policy.description else lambda _ids: ""
    reports = _group_reports(run, groups, gradients, silences, before, after, decode)
    of_tokens = [s for of_group in silences for s in of_group]
    return Explanation(
        run=run_dir.name,
        step=step,
        policy_version=head.policy_version,
        compared=compared,
        metrics=taken.result.metrics,
        max_grad_norm=run.settings.max_grad_norm,
        loss=run.settings.loss,
        silence=sum(of_tokens, Silence()),
        without_advantage=sum(
            s.trained_tokens if s.advantages is None else int((s.trained(s.advantages) == 0).sum())
            for group in groups
            for s in group.sequences
        ),
        versions=_versions(groups),
        sources=sources,
        groups=sorted(reports, key=lambda report: -report.grad_norm),
        ratios=_largest_ratios(groups, before, decode),
    )


def verify(run_dir: Path, _step: int, ranks: Ranks) -> list[Compared]:
    """Compute every step again that led from a checkpoint to the next one, and compare. A collective of all ranks."""
    steps = checkpoints(run_dir)
    return [_compare_between(run_dir, first, last, ranks) for first, last in pairwise(steps)]


FUNCTIONS: dict[str, Callable[[Path, int, Ranks], Any]] = {"explain": explain, "verify": verify}


def run_rank(name: str, run_dir: str, step: str, result: str) -> int:
    """Run a function of FUNCTIONS as the rank that torchrun's variables name; return the exit code."""
    logs.configure("explain", "warning")
    transformers.utils.logging.disable_progress_bar()

    def body() -> None:
        with join_ranks() as ranks:
            value = FUNCTIONS[name](Path(run_dir), int(step), ranks)
            if ranks.is_main:
                plain = [one.model_dump() for one in value] if isinstance(value, list) else value.model_dump()
                # Not orjson, which has no NaN: a step that was not finite is one to explain.
                Path(result).write_text(json.dumps(plain), encoding="utf-8")

    return exit_code_of(body)


def _begin(compared: Compared, run_dir: Path, ranks: Ranks) -> Recomputation:
    """Return the run as it was before the first step, and note from what and with what it is computed."""
    run = Recomputation(run_dir, compared.first - 1, ranks)
    compared.begin = f"checkpoint step-{run.step:06d}" if run.step else run.settings.model_name
    compared.then = run.records.head(compared.first).computation
    compared.now = computation(run.learner.policy, run.ranks)
    return run


def _note(compared: Compared, taken: Taken) -> None:
    compared.metrics += taken.compared
    if taken.differences and compared.step is None:
        compared.step, compared.differences = taken.head.step, taken.differences


def _compare_checkpoint(compared: Compared, run: Recomputation) -> None:
    """Compare the weights and moments with the checkpoint of the last step, if there is one."""
    if run.step in checkpoints(run.run_dir):
        differences, compared.tensors = run.compare()
        if differences and compared.step is None:
            compared.step, compared.differences = run.step, differences


def _compare_between(run_dir: Path, first: int, last: int, ranks: Ranks) -> Compared:
    compared = Compared(first=first + 1, last=last)
    try:
        run = _begin(compared, run_dir, ranks)
        while run.step < last:
            _note(compared, run.take(*run.groups()))
        _compare_checkpoint(compared, run)
    except ConfigurationError as error:
        compared.reason = str(error)
    return compared


def _gradients(learner: Learner, groups: Sequence[TrainingGroup]) -> Gradients:
    """Return the gradients at the present weights; a sum of gradients keeps a copy of the model's size."""
    known = [group for group in groups if not len(unknown_ids(group, learner.policy.config.vocab_size))]
    sizes: dict[int, StepSize] = {}
    for share in learner.shares(known):
        size = learner.part(share).size
        sizes |= {id(group): size for group in share}
        learner.add_gradients(share, size)
    whole, of_groups, of_sources = _taken_gradients(learner), {}, []
    for source in sorted({group.source for group in known}):
        total: list[Tensor | None] = [None] * len(whole)
        own = [group for group in known if group.source == source]
        for group in own:
            learner.add_gradients([group], sizes.get(id(group), StepSize(0, 0)))
            gradient = _taken_gradients(learner)
            of_groups[id(group)] = _norm_and_share(gradient, whole)
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, gradient, strict=True)]
        norm, part = _norm_and_share(total, whole)
        of_sources.append(SourceReport(source=source, groups=len(own), grad_norm=norm, share=part))
    return of_groups, of_sources


def _taken_gradients(learner: Learner) -> list[Tensor | None]:
    """Return the gradients of all trained parameters, and leave none."""
    gradients = [p.grad for group in learner.optimizer.param_groups for p in group["params"]]
    learner.optimizer.zero_grad()
    return gradients


def _norm_and_share(part: Sequence[Tensor | None], whole: Sequence[Tensor | None]) -> tuple[float, float]:
    squares = _dot(whole, whole)
    return _dot(part, part) ** 0.5, _dot(part, whole) / squares if squares else 0.0


def _dot(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    products = [
        (a.double() * b.double()).sum() for a, b in zip(first, second, strict=True) if a is not None and b is not None
    ]
    return sum(float(p.full_tensor() if isinstance(p, DTensor) else p) for p in products)


def _silences(
    learner: Learner, groups: Sequence[TrainingGroup], watched: WatchedLoss, step: int
) -> list[list[Silence]]:
    """Return what the loss did to the tokens of each completion, by group, over all ranks."""
    known = [group for group in groups if not len(unknown_ids(group, learner.policy.config.vocab_size))]
    parts = [learner.part(share) for share in learner.shares(known)]
    batches = [pieces for i in part_order(learner.settings, step - 1) for pieces in parts[i].micro_batches]
    places = {id(s): (g, n) for g, group in enumerate(groups) for n, s in enumerate(group.sequences)}
    found: list[list[Silence]] = [[Silence() for _ in group.sequences] for group in groups]
    mine = [
        (*places[id(sequence)], silence.model_dump())
        # A shared critic that trains alone leaves the policy's loss without a pass.
        for pieces, silences in zip(batches, watched.passes, strict=False)
        for sequence, silence in zip((s for piece in pieces for s in piece.sequences), silences, strict=bool(pieces))
    ]
    # Every rank of a context group has the same.
    by_share = learner.ranks.gather_json(mine)[:: learner.ranks.context.size]
    for g, n, fields in (one for of_share in by_share for one in of_share):
        found[g][n] += Silence(**fields)
    return found


def _versions(groups: Sequence[TrainingGroup]) -> dict[int, int]:
    counts = Counter(v for g in groups for s in g.sequences for v in s.trained(s.policy_versions).tolist())
    return dict(sorted(counts.items()))


def _group_reports(
    run: Recomputation,
    groups: Sequence[TrainingGroup],
    gradients: Mapping[int, tuple[float, float]],
    silences: Sequence[Sequence[Silence]],
    before: Sequence[PerToken],
    after: Sequence[PerToken],
    decode: Callable[[list[int]], str],
) -> list[GroupReport]:
    reports = []
    for place, group in enumerate(groups):
        norm, share = gradients.get(id(group), (0.0, 0.0))
        completions = [
            CompletionReport(
                reward=s.reward,
                advantage=0.0
                if s.advantages is None or not s.trained_tokens
                else float(s.trained(s.advantages).mean()),
                tokens=s.trained_tokens,
                before=float(before[place][n].sum()),
                after=float(after[place][n].sum()),
                silence=silences[place][n],
                text=_short(s.completion or decode(s.completion_ids.tolist())),
            )
            for n, s in enumerate(group.sequences)
        ]
        reports.append(
            GroupReport(
                group_id=group.group_id,
                source=group.source,
                prompt=_short(decode(group.prompt_ids)),
                is_replayed=group.is_replayed,
                weight=group.weight,
                versions=_versions([group]),
                grad_norm=norm,
                share=share,
                completions=completions,
            )
        )
    return reports


def _largest_ratios(
    groups: Sequence[TrainingGroup], before: Sequence[PerToken], decode: Callable[[list[int]], str]
) -> list[Ratio]:
    """Return the tokens with the largest distance of the policy from the one that sampled, the largest first."""
    found = []
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
            ratios[key] = Ratio(
                ratio=float(torch.tensor(distance).exp()),
                group_id=group.group_id,
                completion=number,
                place=place,
                version=int(sequence.policy_versions[place]),
                before=decode(ids[-CONTEXT:]),
                token=texts.token_texts([int(sequence.completion_ids[place])])[0],
            )
    return [*ratios.values()]


def _short(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"


if __name__ == "__main__":
    leave(run_rank(*sys.argv[1:]))
