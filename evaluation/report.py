"""What an evaluation says at its end: results.json, a table, and the curve over the checkpoints of a run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evaluation.checkpoints import Checkpoint
from evaluation.evaluation import Progress
from evaluation.metrics import Answer, Estimate, PromptAnswers, accuracy, by_category, lengths
from evaluation.samples import Key, Kind, Sample
from services.protocol import FinishReason, Prompt

RESULTS = "results.json"
CURVE = "curve.json"
CURVE_IMAGE = "curve.png"


@dataclass
class Results:
    """The numbers of one model."""

    model: str
    name: str
    step: int | None
    fingerprint: str
    dataset: str
    split: str
    workflow: str
    prompts: int
    samples_per_prompt: int
    metrics: dict[str, Estimate]
    categories: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    reward_mean: dict[str, float] = field(default_factory=dict)
    """By kind."""
    completion_tokens: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind: mean, median, p95, max."""
    truncated: dict[str, float] = field(default_factory=dict)
    """Share of completions that ended at their length limit, by kind."""
    agent: dict[str, float] = field(default_factory=dict)
    """Turns and tool calls an episode."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Samples that are in no metric, by reason: a service failed, or an agent did."""
    over_limit: int = 0
    """Samples counted as wrong because the verifier reached its time or memory limit over them."""
    throughput: dict[str, float | None] = field(default_factory=dict)
    servers: dict[str, Any] = field(default_factory=dict)
    policy_versions: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Results:
        """What ``as_dict`` gave."""
        categories = {name: _estimates(metrics) for name, metrics in content["categories"].items()}
        return cls(**{**content, "metrics": _estimates(content["metrics"]), "categories": categories})


def _estimates(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Estimate]:
    return {name: Estimate(**numbers) for name, numbers in metrics.items()}


def results_of(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    samples: Mapping[Key, Sample],
    ks: Sequence[int],
    samples_per_prompt: int,
    *,
    resamples: int,
    seed: int,
    **facts: Any,
) -> Results:
    """The numbers from what is in the store; ``facts`` are further fields."""
    drawn: dict[str, dict[Kind, list[Sample]]] = defaultdict(lambda: {kind: [] for kind in Kind})
    wanted = {prompt.id for prompt in prompts}
    for sample in samples.values():
        within = sample.kind is Kind.GREEDY or sample.index < samples_per_prompt
        if sample.prompt_id in wanted and within:
            drawn[sample.prompt_id][sample.kind].append(sample)
    answers = [_answers(prompt, drawn[prompt.id]) for prompt in prompts]
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    kinds = {kind.value: [s for p in prompts for s in drawn[p.id][kind]] for kind in Kind}
    everything = [sample for of_kind in kinds.values() for sample in of_kind]
    unscored = sum(sample.is_correct is None for sample in everything)
    left_out: dict[str, int] = facts.pop("left_out")
    return Results(
        model=checkpoint.model,
        name=checkpoint.name,
        step=checkpoint.step,
        fingerprint=checkpoint.fingerprint(),
        prompts=len(prompts),
        samples_per_prompt=samples_per_prompt,
        metrics=accuracy(answers, samples_per_prompt, ks, **options),
        categories=by_category(answers, samples_per_prompt, ks, **options),
        reward_mean={kind: mean for kind, given in kinds.items() if (mean := _reward_mean(given)) is not None},
        completion_tokens={k: lengths([s.completion_tokens for s in given]) for k, given in kinds.items() if given},
        truncated={
            kind: statistics.fmean(sample.finish_reason is FinishReason.LENGTH for sample in given)
            for kind, given in kinds.items()
            if given
        },
        agent=_agent(everything),
        left_out={**left_out, **({"unscored": unscored} if unscored else {})},
        over_limit=sum(sample.is_over_limit for sample in everything),
        policy_versions=sorted({s.policy_version for s in everything if s.policy_version is not None}),
        **facts,
    )


def _answers(prompt: Prompt, drawn: Mapping[Kind, Sequence[Sample]]) -> PromptAnswers:
    greedy, sampled = (
        [
            Answer(s.is_correct, s.result.extracted)
            for s in sorted(drawn[kind], key=lambda s: s.index)
            if s.result is not None and s.is_correct is not None
        ]
        for kind in (Kind.GREEDY, Kind.SAMPLED)
    )
    return PromptAnswers(greedy[0] if greedy else None, sampled, prompt.category)


def _reward_mean(samples: Iterable[Sample]) -> float | None:
    rewards = [s.result.reward for s in samples if s.result is not None and s.result.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def _agent(samples: Sequence[Sample]) -> dict[str, float]:
    episodes = [sample for sample in samples if sample.messages is not None]
    if not episodes:
        return {}
    return {
        "turns": statistics.fmean(sample.turns for sample in episodes),
        "tool_calls": statistics.fmean(sample.tool_calls for sample in episodes),
    }


def throughput(progress: Progress) -> dict[str, float | None]:
    """Of this life: what an earlier one made took no time of it."""
    seconds = progress.seconds
    return {
        "seconds": seconds,
        "samples": progress.fresh,
        "samples_resumed": progress.done - progress.fresh,
        "samples_per_second": progress.fresh / seconds if progress.fresh else None,
        "completion_tokens_per_second": progress.tokens / seconds if progress.fresh else None,
    }


def write_json(path: Path, content: Any) -> None:
    """Writes a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.rename(path)


def show(console: Console, everything: Sequence[Results]) -> None:
    """Prints the table of all models, and one by category for each that has any."""
    names = list(dict.fromkeys(name for results in everything for name in results.metrics))
    first = everything[0]
    table = Table(title=f"{first.dataset} {first.split}, {first.prompts} prompts", title_justify="left")
    table.add_column("")
    for results in everything:
        table.add_column(results.name, justify="right")
    for name in names:
        table.add_row(name, *(_estimate(results.metrics.get(name)) for results in everything))
    for label, row in _more_rows(everything):
        table.add_row(label, *row)
    console.print(table)
    for results in everything:
        if results.categories:
            console.print(_category_table(results))
    if reasons := sorted({reason for results in everything for reason in results.left_out}):
        told = ", ".join(f"{sum(r.left_out.get(reason, 0) for r in everything)} {reason}" for reason in reasons)
        console.print(f"left out: {told}", style="yellow")
    if over_limit := sum(results.over_limit for results in everything):
        console.print(f"counted as wrong, over the verifier's time or memory limit: {over_limit}", style="yellow")


def _more_rows(everything: Sequence[Results]) -> list[tuple[str, list[str]]]:
    rows = [
        ("tokens, mean", [_number(r.completion_tokens.get("greedy", {}).get("mean"), ".0f") for r in everything]),
        ("tokens, p95", [_number(r.completion_tokens.get("greedy", {}).get("p95"), ".0f") for r in everything]),
        ("truncated", [_number(r.truncated.get("greedy"), ".1%") for r in everything]),
        ("tokens/s", [_number(r.throughput.get("completion_tokens_per_second"), ".0f") for r in everything]),
    ]
    if any(results.agent for results in everything):
        rows.append(("tool calls", [_number(r.agent.get("tool_calls"), ".2f") for r in everything]))
        rows.append(("turns", [_number(r.agent.get("turns"), ".2f") for r in everything]))
    return rows


def _category_table(results: Results) -> Table:
    names = _headline(results)
    table = Table("category", "prompts", *names, title=f"{results.name} by category", title_justify="left")
    for category, metrics in results.categories.items():
        prompts = max((estimate.prompts for estimate in metrics.values()), default=0)
        table.add_row(category, str(prompts), *(_estimate(metrics.get(name)) for name in names))
    return table


def _step(results: Results, position: int) -> int:
    """Where a checkpoint stands on the curve: its training step, or its place among those given."""
    return position if results.step is None else results.step


def _headline(results: Results) -> list[str]:
    """One metric of a kind: of pass@k and maj@k that with the largest k."""
    return list({name.partition("@")[0]: name for name in results.metrics}.values())


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write_curve(directory: Path, everything: Sequence[Results]) -> None:
    """Writes curve.json, and draws curve.png: each metric over the steps, with its interval."""
    points = [
        {
            "step": _step(results, position),
            "name": results.name,
            "model": results.model,
            "metrics": {name: estimate.as_dict() for name, estimate in results.metrics.items()},
        }
        for position, results in enumerate(everything)
    ]
    write_json(directory / CURVE, points)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in _headline(everything[-1]):
        drawn = [(i, results.metrics[name]) for i, results in enumerate(everything) if name in results.metrics]
        steps = [_step(everything[i], i) for i, _ in drawn]
        estimates = [estimate for _, estimate in drawn]
        axes.plot(steps, [estimate.value for estimate in estimates], marker="o", markersize=3, label=name)
        axes.fill_between(steps, [e.low for e in estimates], [e.high for e in estimates], alpha=0.15)
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(-0.02, 1.02))
    axes.set_title(f"{everything[0].dataset} {everything[0].split}, {everything[0].prompts} prompts")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(directory / CURVE_IMAGE, dpi=120)
