// The components of a run that is under way: health, queues, policy versions.

import { byId, h } from "./dom.js";
import { duration, number } from "./format.js";

const LOOKS = { healthy: "good", starting: "fair", draining: "fair", asking: "fair" };

/** Returns the style of a state. */
export const look = (state) => LOOKS[state] ?? "bad";

/** Returns the state of a component; before the first step, one that has not answered yet is starting. */
export function stateOf({ state, seconds_since_answer: answered }, { step }) {
  return state === "silent" && answered === null && step === 0 ? "starting" : state;
}

/** Shows ``now``, the reply of api/now. */
export function showComponents(now) {
  const trainer = {
    name: "ppo-trainer",
    url: location.host,
    state: "healthy",
    policy_version: now.policy_version,
    figures: { phase: now.phase, step: `${now.step} of ${now.total_steps || "?"}` },
  };
  const cards = [trainer, ...now.components].map((component) => card(component, now.policy_version));
  byId("components").replaceChildren(h("div", { class: "grid" }, cards));
}

function card(component, newest) {
  const behind = component.policy_version === null ? 0 : newest - component.policy_version;
  const version =
    component.policy_version === null || component.policy_version === undefined
      ? []
      : [["policy version", behind > 0 ? `${component.policy_version}, ${behind} behind` : String(component.policy_version)]];
  const figures = Object.entries(component.figures ?? {}).map(([name, value]) => [name, typeof value === "number" ? number(value, 5) : String(value ?? "–")]);
  const silent = component.state === "silent" && component.seconds_since_answer !== null;
  const since = silent ? [["last answer", `${duration(component.seconds_since_answer)} ago`]] : [];
  return h(
    "article",
    { class: "card component", "data-name": component.name },
    h("header", null, h("strong", null, component.name), h("span", { class: `pill ${look(component.state)}` }, component.state)),
    h("p", { class: "muted" }, component.url.replace("http://", "")),
    component.detail ? h("p", { class: "detail" }, component.detail) : null,
    h("dl", null, [...version, ...figures, ...since].map(([name, value]) => [h("dt", null, name), h("dd", null, value)]).flat()),
  );
}
