// The page's plots: metrics, quantity and unit of each.

const perSecond = (tokens, seconds) => ({
  needs: [tokens, seconds],
  make: (a, b) => (a === null || !b ? null : a / b),
});
const billions = (name) => ({ needs: [name], make: (value) => (value === null ? null : value / 1e9) });
// Behind a slash is the source that the metric is of.
const ends = (metric) => ["_low", "_high"].map((end) => metric.replace(/^[^/]+/, (name) => name + end));
const without = (start) => (metric) => metric.replace(start, "");

// A series is [metric, label, spread]: the metric is a name, a pattern of names, or computed from others; `spread` returns
// the names of the metrics that are the ends of a band, or the name of the one that is the distance of both from the
// series. The plot's `spread` explains the band. Several runs show `compared` instead; `name` labels metrics found by
// a pattern. Where a step lacks a metric but has `sparse`, the metric is 0. `note` says what the plot shows and what is
// good. `within` is the metric of a distance that stands for a band in runs that lack it, cut at the rewards that occur.

const FIRST = [
  {
    id: "reward", title: "Reward", unit: "mean over completions",
    note: "Should rise. Single steps vary with their prompts: look at the trend.",
    spread: "band: from the 10% to the 90% quantile",
    within: "reward_std",
    series: [["reward_mean", "reward", () => ["reward_q10", "reward_q90"]]],
  },
  {
    id: "accuracy", title: "Accuracy", unit: "share of held-out prompts",
    note: "Should rise with the reward. If only the reward rises, the model learns the training prompts or a flaw of the reward.",
    spread: "bars: 95% interval",
    markers: true,
    series: [["accuracy", "greedy pass@1", ends], [/^avg_at_\d+$/, null, ends], [/^pass_at_\d+$/, null, ends]],
    name: (metric) => metric.replace("_at_", "@"),
  },
  {
    id: "paired", title: "Fork less its run", unit: "difference at the same step",
    note: "0 up to the fork. Prompts and random numbers are the same, so what remains is the changed setting.",
    series: [["paired_reward_mean", "reward"], ["paired_accuracy", "accuracy"]],
  },
  {
    id: "lengths", title: "Completion length", unit: "tokens",
    note: "May change as the model learns. Bad: it rises to the limit with more truncation, or falls to almost nothing.",
    series: [["length_mean", "mean"], ["length_max", "longest"]],
  },
  {
    id: "entropy", title: "Entropy", unit: "nats a token",
    note: "Uncertainty about the next token. Falls as the model gets surer; near 0 it tries nothing new and stops learning.",
    series: [["entropy", "fresh groups"], ["replay_entropy", "replayed groups"], ["entropy_all", "all groups"]],
  },
  {
    id: "kl", title: "KL divergence", unit: "nats a token",
    note: "Distance of the policy from the behaviour policy, which sampled the completions (good: near 0, steady), and from the reference, the model before training (grows slowly).",
    series: [
      ["kl_behaviour", "behaviour policy to policy"],
      ["kl_reference", "policy to reference"],
      ["replay_kl_behaviour", "replayed, behaviour policy to policy"],
      ["replay_kl_reference", "replayed, policy to reference"],
    ],
  },
  {
    id: "seconds", title: "Time by phase", unit: "seconds a step",
    note: "Less is better. The largest area is the phase to speed up.",
    stacked: true,
    series: [
      "fetch", "generate", "score", "store", "wait", "teach", "replay", "reference", "values", "train", "publish", "evaluate", "record", "save",
    ].map((phase) => [`seconds_${phase}`]),
    compared: [["seconds_step", "step"]],
    name: without("seconds_"),
  },
];

const SOURCES = [
  ["reward_mean", "Reward", "mean over completions", "Should rise for each source. A source that stands still may be too hard, or learn from too few groups."],
  ["accuracy", "Accuracy", "share of held-out prompts", "Greedy pass@1 of each source. Bad: one falls while others rise."],
  ["length_mean", "Completion length", "tokens, mean", "May change as the model learns."],
  ["completion_tokens", "Tokens in each step", "number of tokens", "With AGGREGATION=token_mean, a source counts in the loss by its tokens."],
  ["truncation_rate", "Truncated completions", "share of completions", "Good: near 0."],
  ["staleness_mean", "Staleness", "policy versions, mean", "Age of the policy version that sampled. The slowest source has the oldest groups."],
  ["zero_variance_groups", "Groups with equal rewards", "number of groups", "They teach nothing: prompts of that source are too easy or too hard."],
].map(([metric, title, unit, note]) => ({
  id: `source-${metric}`, title: `${title} by source`, unit, note,
  markers: metric === "accuracy",
  series: [[new RegExp(`^${metric}/`), null, ...(metric === "accuracy" ? [ends] : [])]],
  name: without(`${metric}/`),
}));

const ANSWERS = [
  {
    id: "reward-trained", title: "Reward of trained groups", unit: "mean over completions",
    note: "Dynamic sampling replaces groups whose rewards are all equal, so this hardly rises while the reward does.",
    series: [["reward_trained_mean", "reward"]],
  },
  {
    id: "reward-parts", title: "Parts of the reward", unit: "mean over completions, before weights",
    note: "The mean of each reward function. If one rises while another falls, its weight may be too large.",
    series: [[/^reward_part_/]],
    name: without("reward_part_"),
  },
  {
    id: "judge-cost", title: "Verdicts", unit: "since the reward-server started",
    note: "Replies that were paid for, verdicts that were there already, and answers without a verdict.",
    whole: true,
    series: [["judge_calls", "replies"], ["judge_hits", "there already"], ["judge_failures", "failed"]],
  },
  {
    id: "evaluation", title: "Reward of evaluations", unit: "mean over held-out prompts",
    note: "Should rise; the first point is before training.",
    markers: true,
    series: [["eval_reward", "greedy"]],
  },
  {
    id: "environment", title: "Figures of the environment", unit: "mean over episodes",
    note: "Figures that the environment counts, such as the share of legal moves.",
    series: [[/^environment_/]],
    name: without("environment_"),
  },
  {
    id: "evaluated-environment", title: "Figures of the environment on held-out seeds", unit: "mean over greedy episodes",
    note: "The same figures for seeds that are not trained on.",
    markers: true,
    series: [[/^eval_environment_/]],
    name: without("eval_environment_"),
  },
  {
    id: "wins", title: "Games won", unit: "share of games, by the seat of the policy",
    note: "Against the model itself, about half is right; against another opponent it should rise.",
    series: [[/^win_rate_seat_/]],
    name: without("win_rate_"),
  },
  {
    id: "truncation", title: "Truncated completions", unit: "share of completions",
    note: "Cut off at MAX_NEW_TOKENS, mostly before the answer. Good: near 0.",
    series: [["truncation_rate", "truncated"]],
  },
  {
    id: "groups", title: "Groups in each step", unit: "number of groups, by kind",
    note: "Only a group whose rewards differ teaches something. Bad: most have equal rewards, because prompts are too easy or too hard.",
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
    id: "failed", title: "Failed episodes", unit: "number, by reason",
    note: "Good: 0. Episodes over a limit (limit, timeout, reward_over_limit) are wrong answers; the others have no reward. The samples have the reason of each.",
    whole: true,
    sparse: "episodes_failed",
    series: [["episodes_failed", "all"], [/^episodes_failed_/]],
    compared: [["episodes_failed", "all"]],
    name: without("episodes_failed_"),
  },
  {
    id: "lost", title: "Left out, or over a limit, in each step", unit: "number of completions or updates",
    note: "Good: 0.",
    whole: true,
    series: [["unscorable", "completions not scorable"], ["over_limit", "completions over a limit (wrong)"], ["updates_skipped", "updates not finite"]],
  },
  {
    id: "evaluated", title: "Held-out prompts in each evaluation", unit: "number of prompts",
    note: "Should be the same at each evaluation, with none left out.",
    whole: true,
    markers: true,
    series: [["eval_prompts", "asked"], ["eval_over_limit", "over a limit (wrong)"], ["eval_left_out", "left out"]],
  },
  {
    id: "turns", title: "Turns of an episode", unit: "calls of the model",
    note: "Bad: up to AGENT_MAX_TURNS, beyond which episodes are wrong.",
    series: [["turns_mean", "mean"], ["turns_max", "most"]],
  },
  {
    id: "tool-calls", title: "Tool calls and branches", unit: "number an episode, mean",
    note: "A branch is a conversation that the agent restarted from an earlier message.",
    series: [["tool_calls_mean", "tool calls"], ["branches_mean", "branches"]],
  },
  {
    id: "parsed", title: "Tool calls that parse", unit: "share of tool calls",
    note: "Good: near 1.",
    series: [["tool_calls_parsed", "parsed"]],
  },
];

const UPDATES = [
  {
    id: "loss", title: "Loss", unit: "of an update, no unit",
    note: "Need not fall: its level says nothing about how good the model is. Bad: sudden peaks.",
    series: [["loss"]],
  },
  {
    id: "gradient", title: "Gradient norm", unit: "before clipping",
    note: "Good: steady. Peaks come before a collapse; a lower LEARNING_RATE helps. 0: nothing was learned.",
    series: [["grad_norm", "fresh groups"], ["replay_grad_norm", "replayed groups"]],
  },
  {
    id: "ratio", title: "Probability ratio", unit: "new policy to old, extremes of tokens",
    note: "A token's probability under the policy, divided by that under the policy that sampled it. Good: around 1; far from it, samples are too old or updates too large.",
    series: [
      ["ratio_max", "largest"],
      ["ratio_min", "smallest"],
      ["replay_ratio_max", "replayed, largest"],
      ["replay_ratio_min", "replayed, smallest"],
    ],
  },
  {
    id: "clipped", title: "Clipped tokens", unit: "share of tokens",
    note: "Tokens without a gradient because their ratio is beyond the clip. Good: a few percent at most.",
    series: [
      ["clip_fraction_low", "below"],
      ["clip_fraction_high", "above"],
      ["replay_clip_fraction_low", "replayed, below"],
      ["replay_clip_fraction_high", "replayed, above"],
    ],
  },
  {
    id: "weight", title: "Importance weight", unit: "mean over tokens",
    note: "The factor that corrects for tokens sampled by an older policy or another engine. Good: near 1.",
    series: [["importance_weight", "fresh groups"], ["replay_importance_weight", "replayed groups"]],
  },
  {
    id: "staleness", title: "Staleness", unit: "policy versions",
    note: "Age of the policy version that sampled, in versions. 0 without MODE=async; less is better.",
    series: [["staleness_mean", "mean"], ["staleness_max", "largest"]],
  },
  {
    id: "published", title: "Published change", unit: "share of the weights' change",
    note: "Share of the trained change of the weights that reaches the engines. Good: about 1.",
    series: [["publish_share", "published"]],
  },
  {
    id: "learning-rate", title: "Learning rate", unit: "of the optimizer",
    note: "Follows its schedule.",
    series: [["learning_rate", "learning rate"]],
  },
];

const SPEED = [
  {
    id: "throughput", title: "Throughput", unit: "tokens a second",
    note: "More is better.",
    series: [
      [perSecond("completion_tokens", "seconds_generate"), "generated, while generating"],
      [perSecond("completion_tokens", "seconds_step"), "generated, over the whole step"],
      ["trained_tokens_per_second", "trained, while training"],
    ],
    compared: [[perSecond("completion_tokens", "seconds_step"), "generated, over the whole step"]],
  },
  {
    id: "tokens", title: "Tokens in each step", unit: "number of tokens",
    note: "Trained tokens are fewer where groups have equal rewards.",
    series: [["completion_tokens", "of completions"], ["prompt_tokens", "of prompts"], ["trained_tokens", "trained"]],
    compared: [["trained_tokens", "trained"]],
  },
  {
    id: "workers", title: "Rollout workers", unit: "number that serve the newest policy",
    note: "Bad: fewer than the engines, because one was lost or is behind.",
    whole: true,
    series: [["workers", "workers"]],
  },
  {
    id: "by-disk", title: "Versions over the shared volume", unit: "1: instead of by broadcast",
    note: "Bad: broadcasts failed, so the engines load each version from the volume, which takes longer. The trainer's log has the reason.",
    whole: true,
    series: [["publish_by_disk", "over the volume"]],
  },
  {
    id: "memory", title: "Peak memory", unit: "GB, trainer's rank 0",
    note: "Should not grow from step to step for long.",
    series: [[billions("peak_memory_bytes"), "peak"]],
  },
];

/** The groups of plots, the most important ones first. */
export const GROUPS = [
  { title: null, plots: FIRST },
  { title: "Sources", plots: SOURCES },
  { title: "Answers and rewards", plots: ANSWERS },
  { title: "Updates", plots: UPDATES },
  { title: "Speed and size", plots: SPEED },
];
export const PLOTS = GROUPS.flatMap(({ plots }) => plots);

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
