// The summary of one run above its plots: tiles with its numbers.

import { h } from "./dom.js";
import { count, duration, number } from "./format.js";

/** Returns the tiles for one run. */
export function summarise(run, now) {
  const averaged = run.rewardSteps > 1 ? `${run.rewardSteps} steps` : "step";
  const tiles = [
    ["Reward", change(run.rewards), `first to newest ${averaged}${run.failed ? `, without ${count(run.failed)} failed completions` : ""}`],
    ["Accuracy", change(run.accuracies), [interval(run.accuracyInterval), "held-out, greedy"].filter(Boolean).join(", ")],
    ["Step", duration(run.recent("seconds_step", 5)), "mean of the newest 5"],
    ["Generated", `${number(rate(run, "completion_tokens", "seconds_step"))}/s`, "tokens, over whole steps"],
    ["Policy version", count(now?.policy_version ?? run.last("policy_version")), `staleness ${number(run.last("staleness_max"))}`],
    ["Length", number(run.recent("length_mean", 5)), `tokens, ${number(100 * (run.recent("truncation_rate", 5) ?? NaN))}% truncated`],
  ];
  return h(
    "dl",
    { class: "tiles" },
    tiles.map(([name, value, note]) =>
      h("div", { class: "card" }, h("dt", null, name), h("dd", null, value, " ", h("span", { class: "muted" }, note))),
    ),
  );
}

/** Returns the first and the newest of two values as text; the only one alone. */
export function change([first, last]) {
  return first === null || last === null ? number(last ?? first) : `${number(first)} → ${number(last)}`;
}

/** Returns an accuracy's 95% interval and its number of prompts as text, without what is not known. */
export function interval({ low, high, prompts }) {
  const ends = low === null || high === null ? "" : `${number(low)} to ${number(high)}`;
  return [ends, prompts === null ? "" : `${count(prompts)} prompts`].filter(Boolean).join(", ");
}

function rate(run, tokens, seconds) {
  const [amount, time] = [run.recent(tokens, 5), run.recent(seconds, 5)];
  return amount === null || !time ? null : amount / time;
}
