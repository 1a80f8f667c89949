// The summary above the plots: tiles with the numbers of one run, or a table of several runs.

import { h } from "./dom.js";
import { count, duration, number } from "./format.js";

/** Returns the tiles for one run. */
export function summarise(run, now) {
  const rewards = run.column("reward_mean");
  const tiles = [
    ["Reward", change(mean(rewards?.filter((r) => r !== null).slice(0, 3)), run.recent("reward_mean", 3)), "first to newest 3 steps"],
    ["Accuracy", accuracy(run), `${accuracyError(run)}held-out, greedy`],
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

/** Returns "first → newest", or the newest alone. */
function change(first, last) {
  return first === null || first === undefined ? number(last) : `${number(first)} → ${number(last)}`;
}

/** Returns the accuracy before training and the newest. */
function accuracy(run) {
  return change(run.before?.accuracy, run.last("accuracy"));
}

/** Returns the standard error of the newest accuracy, if known. */
function accuracyError(run) {
  const error = run.last("accuracy_stderr");
  return error === null ? "" : `± ${number(error, 2)}, `;
}

function mean(values) {
  return values?.length ? values.reduce((a, b) => a + b) / values.length : null;
}

function rate(run, tokens, seconds) {
  const [amount, time] = [run.recent(tokens, 5), run.recent(seconds, 5)];
  return amount === null || !time ? null : amount / time;
}

/** Returns the table for several runs, with a box to show or hide each. */
export function compare(runs, changed) {
  const heads = ["", "run", "status", "steps", "reward", "accuracy", "training time", "model", "dataset"];
  const row = (run) => {
    const swatch = h("i", { class: "swatch" });
    swatch.style.setProperty("--swatch", `var(--series-${run.index % 8})`);
    const box = h("input", {
      type: "checkbox",
      "aria-label": `show ${run.name}`,
      checked: run.isShown,
      onchange: (event) => {
        run.isShown = event.target.checked;
        changed();
      },
    });
    const { summary } = run;
    const rewards = run.column("reward_mean")?.filter((r) => r !== null) ?? [];
    const cells = [
      h("span", null, box, swatch),
      run.name,
      run.status,
      count(run.last("step")),
      `${number(mean(rewards.slice(0, 3)))} → ${number(mean(rewards.slice(-3)))}`,
      accuracy(run),
      duration(summary.seconds),
      run.settings.model_name ?? summary.model ?? "–",
      summary.dataset ?? "–",
    ];
    return h("tr", null, cells.map((cell) => h("td", null, cell)));
  };
  return h(
    "div",
    { class: "scroll", tabindex: "0" },
    h("table", null, h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", null, runs.map(row))),
  );
}
