// Groups of samples as cards: answers with reward, text and the verifier's result.

import { answers, figures, meanReward } from "./answers.js";
import { h, marked } from "./dom.js";
import { count, number, some } from "./format.js";

/** The advantages that are 0 where the reward is the group's mean. */
export const BY_MEAN = new Set(["grpo", "dr_grpo", "rloo", "batch_std", "reinforce_baseline"]);

/**
 * Returns the card of a group with ``needle`` marked. Its buttons call ``follow(group)`` to show the prompt over the steps,
 * and ``open(group, place)`` to show one of its answers whole.
 */
export function card(group, needle, follow, open) {
  const mean = meanReward(group);
  const others = group.groups_of_prompt - 1;
  const link = h("button", { type: "button", class: "link", onclick: () => follow(group) }, `Follow this prompt (${some(others + 1, "group")})`);
  return h(
    "article",
    { class: "card group", "aria-label": `${group.group_id ? `group ${group.group_id}` : "evaluation"} of step ${group.step}` },
    h(
      "header",
      null,
      h("strong", null, `step ${count(group.step)}`),
      h("span", { class: "muted" }, group.group_id ? `group ${group.group_id}` : "evaluation"),
      h("span", null, "mean reward ", h("b", null, number(mean))),
      strip(group),
      others > 0 ? link : null,
    ),
    ...question(group, needle),
    h("div", { class: "completions", tabindex: "0", role: "group", "aria-label": "completions" }, completions(group, needle, open)),
  );
}

/** Returns a group's prompt, as given and as the model saw it, its ground truth and its row. */
export function question(group, needle) {
  const text = (words) => h("pre", { tabindex: "0" }, marked(words, needle));
  const rendered = group.rendered_prompt ?? group.prompt;
  const columns = Object.entries(group.row ?? {});
  const row = columns.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, marked(String(value), needle))]);
  return [
    h("div", { class: "prompt" }, h("h2", null, "Prompt"), text(group.prompt ?? "")),
    rendered === group.prompt ? null : h("details", null, h("summary", null, "As the model saw it"), text(rendered)),
    h("p", null, h("span", { class: "muted" }, "ground truth "), h("code", null, marked(String(group.ground_truth ?? ""), needle))),
    columns.length > 0 ? h("details", null, h("summary", null, `Row (${some(columns.length, "column")})`), h("dl", null, row)) : null,
  ];
}

/** Returns the rewards of a group as small bars. */
export function strip(group) {
  const rewards = answers(group).map(([first]) => first.reward);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const bars = rewards.map((reward) => {
    const bar = h("i", { class: reward === null ? "bar missing" : "bar" });
    bar.style.setProperty("--height", `${8 + (92 * ((reward ?? low) - low)) / (high - low)}%`);
    return bar;
  });
  return h("span", { class: "strip", "aria-hidden": "true" }, bars);
}

/** Returns the answers of a group, each compared with the group's mean reward; a button calls ``open(group, place)``. */
export function completions(group, needle, open) {
  const all = answers(group);
  const mean = all.length > 1 ? meanReward(group) : null;
  const even = `equal to the group's mean${BY_MEAN.has(group.advantage) ? ": not trained on" : ""}`;
  return all.map((records, place) => answer(records, mean, even, needle, () => open(group, place)));
}

/** Returns an answer and its comparison with ``mean``, the group's mean reward (null for a single answer); ``even`` is said of one as good. */
function answer(records, mean, even, needle, open) {
  const record = records.at(-1);
  const result = record.result ?? {};
  const sum = (name) => records.reduce((total, { [name]: value }) => total + value, 0);
  const isScored = record.reward !== null && record.reward !== undefined;
  const side = !isScored ? "none" : mean === null ? "alone" : Math.sign(record.reward - mean);
  const [word, look] = { none: ["not scored", "bad"], 1: ["▲ above the group's mean", "above"], "-1": ["▼ below the group's mean", "below"], 0: [even, "even"], alone: ["", "even"] }[side];
  const components = Object.entries(result.components ?? {});
  const facts = [
    ["answer read", result.extracted],
    [record.episode === undefined ? "verifier" : "reason", result.reason],
    ["status", result.status === "scored" ? null : result.status],
    ["parts", components.length > 1 ? components.map(([name, value]) => `${name} ${value === null ? result.failed?.[name] ?? (isScored ? "does not apply" : "–") : number(value)}`).join(", ") : null],
    ["ended by", { stop: "its end token", length: "the length limit", abort: "an abort" }[record.finish_reason] ?? record.finish_reason],
    ...figures(records),
    ["tokens", record.tokens === undefined ? null : count(sum("tokens"))],
    ["trained tokens", (record.trained_tokens ?? record.tokens) === record.tokens ? null : count(sum("trained_tokens"))],
    ["sampled by", record.policy_version === undefined ? null : `policy version ${count(record.policy_version)}`],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "div",
    { class: "completion" },
    h("p", { class: `reward ${look}` }, h("b", null, number(record.reward)), " ", h("span", null, word)),
    h("pre", { tabindex: "0" }, marked(record.completion ?? "", needle)),
    opener(records, open),
    h("dl", null, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, marked(String(value), needle))]).flat()),
  );
}

/** Returns the button that shows an answer whole; null if its text is the whole answer. */
function opener(records, open) {
  const hasConversation = records.some((record) => record.messages?.length);
  if (!hasConversation && !records.some((record) => record.spans)) return null;
  return h("button", { type: "button", class: "link", onclick: open }, hasConversation ? "Whole conversation" : "Its tokens");
}
