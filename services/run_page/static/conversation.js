// A conversation between an agent and the model: who says what, the tools that are called, their results.

import { h } from "./dom.js";
import { count } from "./format.js";

const SPEAKERS = { system: "System", developer: "System", user: "User", function: "Tool" };

/**
 * Returns the conversation ``messages`` as a list. Messages at its beginning that an ``earlier`` conversation
 * begins with, too, are folded away.
 */
export function conversation(messages, earlier) {
  const items = messages.map(item);
  const lengths = earlier.map((other) => shared(messages, other));
  const most = Math.max(0, ...lengths);
  const list = (within) => h("ol", { class: "conversation" }, within);
  if (!most) return list(items);
  const branch = lengths.indexOf(most);
  const summary = `${count(most)} ${most === 1 ? "message" : "messages"} as in ${branch ? `branch ${branch}` : "the main line"}`;
  return h("div", null, h("details", null, h("summary", null, summary), list(items.slice(0, most))), list(items.slice(most)));
}

/** Returns the number of messages that both conversations have at their beginning. */
function shared(messages, others) {
  const isSame = (message, place) => JSON.stringify(message) === JSON.stringify(others[place]);
  const first = messages.findIndex((message, place) => !isSame(message, place));
  return first < 0 ? messages.length : first;
}

function item(message) {
  const calls = message.tool_calls ?? [];
  return h(
    "li",
    { class: `message ${message.sampled ? "of-model" : ""}` },
    h("h3", null, speaker(message)),
    message.content || !calls.length ? h("pre", { tabindex: "0" }, message.content || "(nothing)") : null,
    calls.map((call) =>
      h("div", { class: "call" }, h("p", null, "calls ", h("code", null, call.name)), h("pre", { tabindex: "0" }, readable(call.arguments ?? ""))),
    ),
  );
}

function speaker({ role, name, sampled, is_last: isLast }) {
  if (sampled) return isLast ? ["Model ", h("span", { class: "muted" }, "last answer")] : "Model";
  if (role === "assistant") return ["Assistant ", h("span", { class: "muted" }, "written by the agent")];
  if (role === "tool") return name ? ["Result of ", h("code", null, name)] : "Result of a tool";
  return SPEAKERS[role] ?? role;
}

/** Returns JSON with an argument a line; other text as it is. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
