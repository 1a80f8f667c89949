// The answers of a group, of which an agent's may have several sequences of tokens.

import { count } from "./format.js";

/** Returns the answers of a group, each as its records: one for a completion, one a branch for an episode. */
export function answers(group) {
  const byKey = new Map();
  for (const [place, record] of group.completions.entries()) {
    const key = record.episode ?? `completion ${place}`;
    byKey.set(key, [...(byKey.get(key) ?? []), record]);
  }
  return [...byKey.values()];
}

/** Returns the mean reward of a group; null if nothing could be scored. */
export function meanReward(group) {
  const rewards = answers(group).map(([first]) => first.reward).filter((reward) => reward !== null && reward !== undefined);
  return rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
}

/** Returns the size and shape of an episode as [name, text] pairs; none for a completion. */
export function figures([{ turns, tool_calls: parsed, unparsed_tool_calls: unparsed, branches, turn_rewards: rewards }]) {
  if (turns === undefined) return [];
  const calls = parsed + unparsed ? [["tool calls", `${count(parsed + unparsed)}${unparsed ? ` (${count(unparsed)} unreadable)` : ""}`]] : [];
  const earned = rewards ? [["rewards of turns", rewards.map((reward) => Number(reward.toFixed(3))).join(", ")]] : [];
  return [["turns", count(turns)], ...earned, ...calls, ...(branches ? [["branches", count(branches)]] : [])];
}
