"""The columns of metrics.jsonl as Prometheus metrics, with units in their names and counters for sums.

docs/metrics.md is generated from ``MEASURES``, ``DERIVED`` and ``NAMED``, which explain every column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge

from trainer.reporting.step_metrics import PHASES

STEP = Gauge("trainer_step", "The newest completed step.")
STEPS = Counter("trainer_steps", "Steps completed by this process.")
FINDING = Gauge("trainer_finding", "1 for each thing that is found wrong with the run.", ["rule", "severity"])


@dataclass(frozen=True)
class Measure:
    """A column of metrics.jsonl and its Prometheus metric, which is a counter if its name ends with _total."""

    column: str
    name: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)


def _token_measures() -> Iterator[Measure]:
    """Yield the measures over trained tokens: those of fresh groups, and (``replay_``) those of replayed groups."""
    described = {
        "entropy": ("trainer_entropy_nats", "Mean entropy of the policy at a trained token of a group with a signal."),
        "kl_behaviour": (
            "trainer_kl_behaviour_nats",
            "KL from the behaviour policy to the policy (k3), a trained token of a group with a signal.",
        ),
        "kl_reference": ("trainer_kl_reference_nats", "KL from the policy to the reference, a token (k3)."),
        "ratio_min": ("trainer_probability_ratio_min", "Smallest ratio of the policy to the behaviour policy."),
        "ratio_max": ("trainer_probability_ratio_max", "Largest ratio of the policy to the behaviour policy."),
        "importance_weight": ("trainer_importance_weight_mean", "Mean importance weight of a token."),
        "value_loss": ("trainer_value_loss", "Mean value loss of a token, before VALUE_COEF."),
        "value_clip_fraction": ("trainer_clipped_values_ratio", "Share of tokens whose value VALUE_CLIP bounds."),
        "off_policy_fraction": ("trainer_off_policy_tokens_ratio", "Share of tokens left out by OFF_POLICY_MAX_KL."),
    }
    for groups, prefix in (("fresh", ""), ("replayed", "replay_")):
        for column, (name, text) in described.items():
            yield Measure(prefix + column, name, text, {"groups": groups})
        for bound in ("low", "high"):
            text = "Share of tokens that a bound of the loss leaves without gradient, or whose weight it cuts (cispo). "
            text += "Updates in which no bound can act are left out."
            labels = {"groups": groups, "bound": bound}
            yield Measure(f"{prefix}clip_fraction_{bound}", "trainer_clipped_tokens_ratio", text, labels)


_PHASE = "Time of the steps by phase; the other phases together are the phase `step`."
_TOKENS = "Tokens, by what they are."
_GROUPS = "Groups, by what became of them."
_EPISODES = "Tokens sampled for episodes since the run began, by where they are; engines have the sum of all others."

_COLUMNS = {
    ("overlap_seconds", "overlap_seconds_total"): "Time in which a step trained while its other groups were generated "
    "or scored, within these two phases.",
    ("reward_mean", "reward_mean"): "Mean reward of all completions that the step made.",
    ("reward_trained_mean", "reward_trained_mean"): "Mean reward of the fresh completions that are trained on, with "
    "DYNAMIC_SAMPLING_TRIES.",
    ("reward_std", "reward_std"): "Standard deviation of the step's rewards.",
    ("reward_q10", "reward_q10"): "The reward that 10% of the step's completions are below.",
    ("reward_q90", "reward_q90"): "The reward that 90% of the step's completions are below.",
    ("accuracy", "accuracy_ratio"): "Greedy pass@1 on held-out prompts, at the newest evaluation.",
    ("accuracy_stderr", "accuracy_stderr_ratio"): "Standard error of the newest accuracy (binomial).",
    ("accuracy_low", "accuracy_low_ratio"): "Lower end of its 95% interval (Wilson's score interval).",
    ("accuracy_high", "accuracy_high_ratio"): "Upper end of its 95% interval.",
    ("eval_reward", "evaluation_reward_mean"): "Mean greedy reward on held-out prompts.",
    ("eval_prompts", "evaluation_prompts"): "Held-out prompts of the newest evaluation.",
    ("eval_over_limit", "evaluation_answers_over_limit"): "Held-out answers counted as wrong because they are over a "
    "limit of the verifier or of an episode.",
    ("eval_left_out", "evaluation_prompts_left_out"): "Held-out prompts left out of the accuracy because generating "
    "or scoring their answer failed.",
    ("loss", "loss"): "The loss.",
    ("teacher_loss", "teacher_loss"): "Distance of the policy from the teacher, before TEACHER_COEF.",
    ("teacher_overlap", "teacher_overlap_ratio"): "Share of the policy's 8 likeliest tokens that are among the "
    "teacher's, every tenth step (TEACHER_MODEL).",
    ("teacher_missing", "teacher_missing_total"): "Sequences that their teacher has not scored: too long for it, or "
    "the endpoint failed.",
    ("grad_norm", "grad_norm"): "Norm of the gradient before it was clipped.",
    ("expert_max_violation", "expert_max_violation_ratio"): "MaxVio of a mixture of experts at trained tokens: "
    "largest load of an expert over the mean load, less 1; mean over layers.",
    ("groups_refused", "groups_refused_total"): "Groups left out for token ids that the model lacks.",
    ("explained_variance", "explained_variance_ratio"): "Share of the returns' variance that the critic explains.",
    ("value_mean", "value_mean"): "Mean value of a token's state, before the step.",
    ("return_mean", "return_mean"): "Mean return of a token: what the critic is fitted to.",
    ("learning_rate", "learning_rate"): "Learning rate.",
    ("publish_share", "publish_share_ratio"): "Share of the training's change of the weights that the published "
    "weights have (PUBLISH_TYPE=bfloat16).",
    ("updates_skipped", "updates_skipped_total"): "Updates left out, being not finite.",
    ("length_mean", "completion_length_mean"): "Mean length of all completions made, in tokens.",
    ("length_max", "completion_length_max"): "Longest of all completions made, in tokens.",
    ("truncation_rate", "truncated_ratio"): "Share of all completions made that were cut off.",
    ("turns_mean", "turns_mean"): "Mean number of the model's turns in an agent's episode.",
    ("turns_max", "turns_max"): "Most turns of the model in an episode.",
    ("branches_mean", "branches_mean"): "Mean number of branches of an episode.",
    ("episode_calls_repeated", "episode_calls_repeated_total"): "Requests of agents that got the reply of an earlier "
    "call, because they repeated it.",
    ("tool_calls_mean", "tool_calls_mean"): "Mean number of tool calls in an episode.",
    ("tool_calls_parsed", "tool_calls_parsed_ratio"): "Share of the tool calls that could be parsed.",
    ("completions", "completions_total"): "Completions that the step made.",
    ("unscorable", "completions_without_reward_total"): "Completions that could not be scored.",
    ("over_limit", "completions_over_limit_total"): "Completions over a limit, which are wrong answers: of the "
    "verifier, or of an episode.",
    ("staleness_mean", "staleness_mean"): "Mean staleness of the groups, in policy versions.",
    ("staleness_max", "staleness_max"): "Largest staleness of a group, in policy versions.",
    ("policy_version", "policy_version"): "The newest published policy version.",
    ("workers", "workers"): "Rollout workers that serve the newest policy version.",
    ("pause_seconds", "worker_pause_seconds"): "Longest that a worker did not generate to be updated.",
    ("publish_by_disk", "publish_by_disk"): "1 once broadcasts have failed and the run publishes over the shared "
    "volume instead.",
    ("workers_proven", "workers_proven"): "Workers whose weights are proven by digests; the others' answers to a "
    "fixed text agree.",
    ("workers_refused", "workers_refused"): "Workers that confirmed the newest policy version and computed with "
    "something else.",
    ("proof_seconds", "proof_seconds"): "Time of the publication in which its version was proven.",
    ("probe_difference", "probe_difference_nats"): "Largest mean difference, a token of a fixed text, between a "
    "worker's log-probabilities and the trainer's.",
    ("probe_delivered", "probe_delivered"): "Least share of the change between two versions that a worker's answers "
    "show; left out while no two differ by four times the noise.",
    ("gap_residual", "gap_residual"): "Mean difference, at most 1 nat a token, between a worker's and the trainer's "
    "log-probabilities of the step's completions with the same version; measured when kl_behaviour is unusual.",
    ("served_version", "served_version"): "The oldest version that fits a worker's answers best; left out likewise.",
    ("peak_memory_bytes", "peak_memory_bytes"): "Most memory that rank 0, or its GPU, has held.",
}
"""The columns whose metrics have no labels, each with its metric, without the prefix, and its meaning."""

MEASURES: tuple[Measure, ...] = (
    *(Measure(column, f"trainer_{name}", text) for (column, name), text in _COLUMNS.items()),
    *_token_measures(),
    Measure(
        "entropy_all",
        "trainer_entropy_nats",
        "Mean entropy of the policy at a trained token of all groups made, with a signal or not; every tenth step.",
        {"groups": "all"},
    ),
    Measure("completion_tokens", "trainer_tokens_total", _TOKENS, {"kind": "completion"}),
    Measure("prompt_tokens", "trainer_tokens_total", _TOKENS, {"kind": "prompt"}),
    Measure("trained_tokens", "trainer_tokens_total", _TOKENS, {"kind": "trained"}),
    Measure("groups", "trainer_groups_total", _GROUPS, {"kind": "fresh"}),
    Measure("zero_variance_groups", "trainer_groups_total", _GROUPS, {"kind": "zero_variance"}),
    Measure("groups_resampled", "trainer_groups_total", _GROUPS, {"kind": "resampled"}),
    Measure("groups_dropped_stale", "trainer_groups_total", _GROUPS, {"kind": "dropped_stale"}),
    Measure("replay_groups", "trainer_groups_total", _GROUPS, {"kind": "replayed"}),
    Measure("replay_groups_left_out", "trainer_groups_total", _GROUPS, {"kind": "replay_left_out"}),
    Measure("groups_unrecorded", "trainer_groups_total", _GROUPS, {"kind": "unrecorded"}),
    Measure("episode_tokens_engines", "trainer_run_episode_tokens", _EPISODES, {"where": "engines"}),
    Measure("episode_tokens_traces", "trainer_run_episode_tokens", _EPISODES, {"where": "traces"}),
    Measure("episode_tokens_open", "trainer_run_episode_tokens", _EPISODES, {"where": "open"}),
    *(Measure(f"seconds_{p}", "trainer_phase_seconds_total", _PHASE, {"phase": p}) for p in (*PHASES, "step")),
)

DERIVED = {
    "step": "Number of the step.",
    "time": "When the step ended, in seconds since 1970.",
    "reward_counts": "How many completions have each reward: [reward, count] pairs; rewards of more than 20 values are "
    "counted in 20 intervals, each under its middle.",
    "failures": "Completions without a reward or over a limit: [reason, count, what one of them says], the most "
    "frequent reason first.",
    "facts": "Sums over the step's groups from which `grpo diagnose` judges the run, by name; `prompts` has the place "
    "of each group's prompt in the data, and `examples` the groups with a fault.",
    "episodes_failed": "Episodes of an agent without a reward, and those over a limit, over all reasons.",
    "trained_tokens_per_second": "trained_tokens over the seconds of the updates; in Prometheus, from the counters.",
}
"""Columns that Prometheus has no metric for."""

_PATTERNS = {
    (
        "teacher_k1, teacher_k3, teacher_k1/<source>, teacher_k1_of_<teacher>, teacher_k1_from_<place>",
        "teacher_distance_nats",
        r"teacher_(?P<estimate>k1|k3)(?:/(?P<source>.+)|_of_(?P<teacher>.+)|_from_(?P<place>\d+))?",
    ): "KL from the policy that sampled to the teacher, a token: k1 may be negative, k3 is not. By source and "
    "teacher, and k1 by place in the completion: from token 0, 16, 64, 256, 1024 and 4096 on.",
    ("<column>/<source>", "source", r"(?P<column>[^/]+)/(?P<source>[a-z0-9][a-z0-9_.-]*)"): "The figure of a column "
    "for the groups, or the held-out prompts, of one of SOURCES; `epoch` is the latest epoch of its prompts.",
    ("avg_at_<k>, pass_at_<k>", "samples_ratio", r"(?P<measure>avg|pass)_at_(?P<k>\d+)"): "avg@k and pass@k on "
    "held-out prompts, by k.",
    (
        "avg_at_<k>_stderr, pass_at_<k>_stderr",
        "samples_stderr_ratio",
        r"(?P<measure>avg|pass)_at_(?P<k>\d+)_stderr",
    ): "Standard errors of avg@k and pass@k, clustered by prompt.",
    (
        "avg_at_<k>_low, avg_at_<k>_high, pass_at_<k>_low, pass_at_<k>_high",
        "samples_interval_ratio",
        r"(?P<measure>avg|pass)_at_(?P<k>\d+)_(?P<end>low|high)",
    ): "Ends of the 95% intervals of avg@k and pass@k (Wilson's, over prompts).",
    ("episode_tokens_lost_<reason>", "run_episode_tokens_lost", r"episode_tokens_lost_(?P<reason>\w+)"): "Tokens "
    "sampled for episodes since the run began that no trace has, by reason, as the gateway counts them.",
    ("episodes_failed_<reason>", "episodes_failed_total", r"episodes_failed_(?P<reason>.+)"): "Failed episodes of an "
    "agent, by reason. Those over a limit (limit, timeout, reward_over_limit) are wrong answers, the others have no "
    "reward.",
    ("eval_environment_<figure>", "evaluation_environment_mean", r"eval_environment_(?P<figure>.+)"): "Mean of a "
    "figure of the environment over the greedy episodes of the newest evaluation.",
    ("environment_<figure>", "environment_mean", r"environment_(?P<figure>.+)"): "Mean over episodes of a figure that "
    "the environment gives about actions, such as the share of legal moves.",
    ("win_rate_seat_<seat>", "win_rate_ratio", r"win_rate_seat_(?P<seat>\d+)"): "Share of games won, by the seat of "
    "the policy.",
    ("judge_<figure>", "judge", r"judge_(?P<figure>.+)"): "Figures of the judge since the reward-server started: "
    "calls, tokens, hits, failures by reason.",
    ("reward_part_<function>", "reward_part_mean", r"reward_part_(?P<function>.+)"): "Mean value of each reward "
    "function of a REWARD_FN with several, before its weight.",
    ("role_baseline_<role>", "role_baseline_mean", r"role_baseline_(?P<role>.+)"): "Running mean of a role's rewards, "
    "the baseline of ADVANTAGE=rae: source and seat, or `all` without either.",
}
"""The same of metrics with several columns each, and the pattern of these, whose groups become the metric's labels."""
NAMED = tuple(
    (Measure(columns, f"trainer_{name}", text), re.compile(pattern))
    for (columns, name, pattern), text in _PATTERNS.items()
)
"""The measures with several columns each, and the patterns of the columns."""


def _register() -> dict[str, Counter | Gauge]:
    metrics: dict[str, Counter | Gauge] = {}
    for measure, labels in (*((m, p.groupindex) for m, p in NAMED), *((m, m.labels) for m in MEASURES)):
        if measure.name not in metrics:
            kind = Counter if measure.name.endswith("_total") else Gauge
            metrics[measure.name] = kind(measure.name, measure.help, list(labels))
    return metrics


_METRICS = _register()
_BY_COLUMN = {measure.column: measure for measure in MEASURES}


def count_step(step: int) -> None:
    """Count a completed step, and export its number."""
    STEP.set(step)
    STEPS.inc()


def export_findings(found: Iterable[tuple[str, str]]) -> None:
    """Export what is found wrong with the run, each with its rule and severity, and nothing else."""
    FINDING.clear()
    for labels in found:
        FINDING.labels(*labels).set(1)


def export(metrics: Mapping[str, float]) -> None:
    """Export metrics by column. A gauge keeps its value when a step lacks it, such as the accuracy."""
    for column, value in metrics.items():
        measured = _measure(column)
        if measured is None:
            continue
        measure, labels = measured
        metric = _METRICS[measure.name]
        child = metric.labels(**labels) if labels else metric
        if isinstance(child, Counter):
            child.inc(value)
        else:
            child.set(value)


def _measure(column: str) -> tuple[Measure, Mapping[str, str]] | None:
    """Return the measure of a column with the metric's labels; None for a column that is not exported."""
    for measure, pattern in NAMED:
        if match := pattern.fullmatch(column):
            return measure, match.groupdict("")
    of_column = _BY_COLUMN.get(column)
    return None if of_column is None else (of_column, of_column.labels)
