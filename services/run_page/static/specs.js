// The page's plots: metrics, quantity and unit of each.

const perSecond = (tokens, seconds) => ({
  needs: [tokens, seconds],
  make: (a, b) => (a === null || !b ? null : a / b),
});
const billions = (name) => ({ needs: [name], make: (value) => (value === null ? null : value / 1e9) });
const ends = (metric) => [`${metric}_low`, `${metric}_high`];
const without = (start) => (metric) => metric.replace(start, "");

// A series is [metric, label, spread]: the metric is a name, a pattern of names, or computed from others; `spread` returns
// the names of the metrics that are the ends of a band, or the name of the one that is the distance of both from the
// series. `spread` of the plot says what the band is. Several runs show `compared` instead; `name` labels metrics found by
// a pattern. Where a step lacks a metric but has `sparse`, the metric is 0.
export const PLOTS = [
  {
    id: "reward",
    title: "Reward",
    unit: "mean over completions",
    spread: "band: standard deviation",
    series: [["reward_mean", "reward", () => "reward_std"]],
  },
  {
    id: "accuracy",
    title: "Accuracy",
    unit: "share of held-out prompts",
    spread: "bars: 95% interval",
    markers: true,
    series: [["accuracy", "greedy pass@1", ends], [/^avg_at_\d+$/, null, ends], [/^pass_at_\d+$/, null, ends]],
    name: (metric) => metric.replace("_at_", "@"),
  },
  {
    id: "reward-parts",
    title: "Parts of the reward",
    unit: "mean over completions, before weights",
    series: [[/^reward_part_/]],
    name: without("reward_part_"),
  },
  {
    id: "environment",
    title: "Figures of the environment",
    unit: "mean over episodes",
    series: [[/^environment_/]],
    name: without("environment_"),
  },
  {
    id: "evaluated-environment",
    title: "Figures of the environment on held-out seeds",
    unit: "mean over greedy episodes",
    markers: true,
    series: [[/^eval_environment_/]],
    name: without("eval_environment_"),
  },
  {
    id: "wins",
    title: "Games won",
    unit: "share of games, by the seat of the policy",
    series: [[/^win_rate_seat_/]],
    name: without("win_rate_"),
  },
  { id: "loss", title: "Loss", unit: "of an update, no unit", series: [["loss"]] },
  {
    id: "kl",
    title: "KL divergence",
    unit: "nats a token",
    series: [
      ["kl_behaviour", "to the behaviour policy"],
      ["kl_reference", "to the reference"],
      ["replay_kl_behaviour", "replayed, to the behaviour policy"],
      ["replay_kl_reference", "replayed, to the reference"],
    ],
  },
  {
    id: "entropy",
    title: "Entropy",
    unit: "nats a token",
    series: [["entropy", "fresh groups"], ["replay_entropy", "replayed groups"]],
  },
  { id: "lengths", title: "Completion length", unit: "tokens", series: [["length_mean", "mean"], ["length_max", "longest"]] },
  {
    id: "seconds",
    title: "Time by phase",
    unit: "seconds a step",
    stacked: true,
    series: [/wait/, /generate/, /reward/, /score/, /store/, /train/, /publish/, /evaluate/].map((p) => [
      new RegExp(`^seconds_(?!step)${p.source}$`),
    ]),
    compared: [["seconds_step", "step"]],
    name: without("seconds_"),
  },
  {
    id: "throughput",
    title: "Throughput",
    unit: "tokens a second",
    series: [
      [perSecond("completion_tokens", "seconds_generate"), "generated, while generating"],
      [perSecond("completion_tokens", "seconds_step"), "generated, over the whole step"],
      ["trained_tokens_per_second", "trained, while training"],
    ],
  },
  {
    id: "tokens",
    title: "Tokens in each step",
    unit: "number of tokens",
    series: [["completion_tokens", "of completions"], ["prompt_tokens", "of prompts"], ["trained_tokens", "trained"]],
    compared: [["trained_tokens", "trained"]],
  },
  {
    id: "clipped",
    title: "Clipped tokens",
    unit: "share of tokens",
    series: [
      ["clip_fraction_low", "below"],
      ["clip_fraction_high", "above"],
      ["replay_clip_fraction_low", "replayed, below"],
      ["replay_clip_fraction_high", "replayed, above"],
    ],
  },
  {
    id: "ratio",
    title: "Probability ratio",
    unit: "new policy to old, extremes of tokens",
    series: [
      ["ratio_max", "largest"],
      ["ratio_min", "smallest"],
      ["replay_ratio_max", "replayed, largest"],
      ["replay_ratio_min", "replayed, smallest"],
    ],
  },
  {
    id: "weight",
    title: "Importance weight",
    unit: "mean over tokens",
    series: [["importance_weight", "fresh groups"], ["replay_importance_weight", "replayed groups"]],
  },
  {
    id: "gradient",
    title: "Gradient norm",
    unit: "before clipping",
    series: [["grad_norm", "fresh groups"], ["replay_grad_norm", "replayed groups"]],
  },
  { id: "staleness", title: "Staleness", unit: "policy versions", series: [["staleness_mean", "mean"], ["staleness_max", "largest"]] },
  { id: "turns", title: "Turns of an episode", unit: "calls of the model", series: [["turns_mean", "mean"], ["turns_max", "most"]] },
  {
    id: "tool-calls",
    title: "Tool calls and branches",
    unit: "number an episode, mean",
    series: [["tool_calls_mean", "tool calls"], ["branches_mean", "branches"]],
  },
  { id: "parsed", title: "Tool calls that parse", unit: "share of tool calls", series: [["tool_calls_parsed", "parsed"]] },
  {
    id: "failed",
    title: "Failed episodes",
    unit: "number without a reward, by reason",
    whole: true,
    sparse: "episodes_failed",
    series: [["episodes_failed", "all"], [/^episodes_failed_/]],
    compared: [["episodes_failed", "all"]],
    name: without("episodes_failed_"),
  },
  { id: "truncation", title: "Truncated completions", unit: "share of completions", series: [["truncation_rate", "truncated"]] },
  {
    id: "groups",
    title: "Groups in each step",
    unit: "number of groups, by what became of them",
    whole: true,
    series: [
      ["groups", "fresh"],
      ["zero_variance_groups", "fresh, all rewards equal"],
      ["replay_groups", "replayed"],
      ["groups_resampled", "replaced"],
      ["groups_dropped_stale", "dropped as stale"],
    ],
    compared: [["zero_variance_groups", "fresh, all rewards equal"]],
  },
  {
    id: "lost",
    title: "Left out in each step",
    unit: "number of completions or updates",
    whole: true,
    series: [["unscorable", "completions not scorable"], ["updates_skipped", "updates not finite"]],
  },
  {
    id: "evaluation",
    title: "Reward of evaluations",
    unit: "mean over held-out prompts",
    markers: true,
    series: [["eval_reward", "greedy"]],
  },
  {
    id: "evaluated",
    title: "Held-out prompts in each evaluation",
    unit: "number of prompts",
    whole: true,
    markers: true,
    series: [["eval_prompts", "asked"], ["eval_over_limit", "over the verifier's limits"], ["eval_left_out", "left out"]],
  },
  { id: "learning-rate", title: "Learning rate", unit: "of the optimizer", series: [["learning_rate", "learning rate"]] },
  {
    id: "workers",
    title: "Rollout workers",
    unit: "number that serve the newest policy",
    whole: true,
    series: [["workers", "workers"]],
  },
  { id: "memory", title: "Peak memory", unit: "GB, trainer's rank 0", series: [[billions("peak_memory_bytes"), "peak"]] },
];

// Units of metrics without a plot above, by patterns of their names.
const UNITS = [
  [/bytes/, "bytes"],
  [/(^|_)seconds(_|$)/, "seconds"],
  [/per_second/, "a second"],
  [/tokens/, "tokens"],
  [/(rate|fraction|ratio|share)$/, "share"],
];

/** Returns the plot of a metric that PLOTS does not contain. */
export function plotOf(name) {
  const unit = UNITS.find(([pattern]) => pattern.test(name))?.[1] ?? "as in metrics.jsonl";
  return { id: `metric-${name}`, title: name, unit, series: [[name, name]] };
}
