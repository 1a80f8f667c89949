// The summary of one run above its plots: tiles with its numbers.

import { h } from "./dom.js";
import { clock, count, duration, number, some } from "./format.js";

const NOTHING = number(null);

/** Returns the summary of one run: what it does before its first step, else the server's findings and its tiles. */
export function summarise(run, now) {
  if (!run.steps && !now?.step) return waiting(run, now);
  return h("div", null, run.findings.map(finding), tiles(run, now));
}

const COLOURS = { wrong: "bad", doubt: "fair", note: "muted" };

function finding({ severity, text }) {
  return h("p", { class: `finding ${COLOURS[severity]}`, role: "status" }, text);
}

/** Returns what a run without a step does, for how long and until when. */
function waiting(run, now) {
  if (!now) return h("p", { class: "muted" }, run.isOver ? "The run ended before its first step." : "No step yet.");
  const { what, done, since, until } = now.activity;
  const here = now.components.filter(({ state }) => state === "healthy").length;
  const facts = [done, `for ${duration(Date.now() / 1000 - since)}`, until && `until ${clock(until)}`].filter(Boolean);
  return h(
    "div",
    { class: "card waiting", role: "status" },
    h("p", null, h("strong", null, `${what[0].toUpperCase()}${what.slice(1)}`), `: ${facts.join(", ")}.`),
    h("p", { class: "muted" }, `${count(here)} of ${some(now.components.length, "component")} healthy. The plots come with the first step.`),
  );
}

function tiles(run, now) {
  const averaged = run.rewardSteps > 1 ? `${run.rewardSteps} steps` : "step";
  const truncated = run.recent("truncation_rate", 5);
  const speed = rate(run, "completion_tokens", "seconds_step");
  const staleness = run.last("staleness_max");
  const facts = [
    ["Reward", change(run.rewards), `first to newest ${averaged}${run.failed ? `, without ${some(run.failed, "failed completion")}` : ""}`],
    ["Accuracy", change(run.accuracies), [interval(run.accuracyInterval), "held-out, greedy"].filter(Boolean).join(", ")],
    ["Step", duration(run.recent("seconds_step", 5)), "mean of the newest 5"],
    ["Generated", speed === null ? NOTHING : `${number(speed)}/s`, "tokens, over whole steps"],
    ["Policy version", count(now?.policy_version ?? run.last("policy_version")), completionsOf(staleness)],
    ["Length", number(run.recent("length_mean", 5)), `tokens${truncated === null ? "" : `, ${number(100 * truncated)}% truncated`}`],
  ].filter(([, value]) => value !== NOTHING);
  return h(
    "dl",
    { class: "tiles" },
    facts.map(([name, value, note]) =>
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
  return [ends, prompts === null ? "" : `${some(prompts, "prompt")}`].filter(Boolean).join(", ");
}

function completionsOf(staleness) {
  if (staleness === null) return "";
  return staleness ? `completions up to ${some(staleness, "version")} older` : "completions by the policy in training";
}

function rate(run, tokens, seconds) {
  const [amount, time] = [run.recent(tokens, 5), run.recent(seconds, 5)];
  return amount === null || !time ? null : amount / time;
}
