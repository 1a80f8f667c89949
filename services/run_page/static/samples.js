// The browser of samples: groups, newest first, with their completions side by side.

import { get } from "./api.js";
import { byId, h, marked, setText, show } from "./dom.js";
import { number } from "./format.js";

const PAGE = 6;

export class Samples {
  /** ``fail`` is called with what a request failed with. */
  constructor(fail) {
    this.fail = fail;
    this.runs = [];
    this.list = h("div", { id: "groups" });
    this.state = h("p", { class: "muted", role: "status", id: "samples-state" });
    this.older = h("button", { type: "button", hidden: true, onclick: () => this.search(this.before) }, "Older groups");
    this.fresh = h("button", { type: "button", hidden: true, onclick: () => this.start() }, "Show the newest");
    this.form = this.makeForm();
    byId("samples").replaceChildren(this.form, this.fresh, this.list, this.state, this.older);
    this.search_ = 0;
  }

  makeForm() {
    const field = (label, properties) => h("label", null, label, " ", h("input", properties));
    this.run = h("select", { name: "run", "aria-label": "run" });
    const form = h(
      "form",
      { class: "controls", id: "samples-form", onsubmit: (event) => event.preventDefault() },
      this.run,
      field("Text", { name: "text", type: "search", placeholder: "in prompts and completions", size: 24 }),
      field("Steps", { name: "step_from", type: "number", min: 0, placeholder: "first", class: "short" }),
      field("to", { name: "step_to", type: "number", min: 0, placeholder: "last", class: "short" }),
      field("Reward", { name: "reward_from", type: "number", step: "any", placeholder: "lowest", class: "short" }),
      field("to", { name: "reward_to", type: "number", step: "any", placeholder: "highest", class: "short" }),
      h("label", null, "Groups ", h("select", { name: "spread" }, h("option", { value: "any" }, "all"), h("option", { value: "mixed" }, "whose rewards differ"), h("option", { value: "equal" }, "whose rewards are equal"))),
      h("button", { type: "reset", onclick: () => setTimeout(() => this.start()) }, "Clear"),
    );
    let wait;
    form.addEventListener("input", () => {
      clearTimeout(wait);
      wait = setTimeout(() => this.start(), 250);
    });
    return form;
  }

  /** Takes the runs there are to choose from. */
  take(runs) {
    this.runs = runs;
    const names = runs.map((run) => run.name);
    if (names.join("\n") !== [...this.run.options].map((option) => option.value).join("\n")) {
      this.run.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    show(this.run, names.length > 1);
  }

  /** Shows the samples of one step. */
  choose(step) {
    this.form.reset();
    this.form.elements.step_from.value = this.form.elements.step_to.value = String(step);
    this.start();
  }

  /** Called when the page has become visible, and whenever the run has gone on. */
  async refresh() {
    if (!this.hasStarted) return this.start();
    try {
      const { total } = await get("api/groups", { run: this.run.value, limit: 1, before: 0 });
      const count = total - this.total;
      show(this.fresh, count > 0);
      setText(this.fresh, `Show ${count} newer groups`);
    } catch (error) {
      this.fail(error);
    }
  }

  start() {
    this.hasStarted = true;
    show(this.fresh, false);
    this.list.replaceChildren();
    return this.search(null);
  }

  /** Shows a page of groups from ``before`` on; goes on asking while the server has not found enough. */
  async search(before) {
    const turn = ++this.search_;
    const query = Object.fromEntries(new FormData(this.form));
    let wanted = PAGE;
    show(this.older, false);
    try {
      do {
        const reply = await get("api/groups", { ...query, before, limit: wanted });
        if (turn !== this.search_) return;
        this.total = reply.total;
        before = reply.before;
        wanted -= reply.groups.length;
        this.list.append(...reply.groups.map((group) => card(group, query.text)));
        setText(this.state, this.describe(reply, wanted > 0 && before !== null));
      } while (wanted > 0 && before !== null);
      this.before = before;
      show(this.older, before !== null);
    } catch (error) {
      if (turn === this.search_) this.fail(error);
    }
  }

  describe(reply, goesOn) {
    const count = this.list.childElementCount;
    if (!reply.total) return "No samples yet.";
    if (goesOn) return `${count} groups; searching, at step ${reply.searched_to_step} …`;
    if (reply.before === null) return count ? `${count} groups, no more.` : "No group fits.";
    return `${count} groups, down to step ${reply.searched_to_step}.`;
  }
}

function card(group, needle) {
  const rewards = group.completions.map((c) => c.reward).filter((reward) => reward !== null && reward !== undefined);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
  return h(
    "article",
    { class: "card group", "aria-label": `group ${group.group_id} of step ${group.step}` },
    h(
      "header",
      null,
      h("strong", null, `step ${group.step}`),
      h("span", { class: "muted" }, `group ${group.group_id}`),
      h("span", null, "mean reward ", h("b", null, number(mean))),
      strip(group.completions),
    ),
    h("div", { class: "prompt" }, h("h3", null, "Prompt"), h("pre", { tabindex: "0" }, marked(group.prompt ?? "", needle))),
    h("p", null, h("span", { class: "muted" }, "ground truth "), h("code", null, marked(String(group.ground_truth ?? ""), needle))),
    h("div", { class: "completions", tabindex: "0", "aria-label": "completions" }, group.completions.map((c) => completion(c, mean, needle))),
  );
}

/** The rewards of a group as small bars. */
function strip(completions) {
  const rewards = completions.map((c) => c.reward ?? 0);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const bars = completions.map((c) => {
    const bar = h("i", { class: c.reward === null ? "bar missing" : "bar" });
    bar.style.setProperty("--height", `${8 + (92 * ((c.reward ?? low) - low)) / (high - low)}%`);
    return bar;
  });
  return h("span", { class: "strip", "aria-hidden": "true" }, bars);
}

function completion(record, mean, needle) {
  const result = record.result ?? {};
  const side = record.reward === null || record.reward === undefined ? "none" : Math.sign(record.reward - mean);
  const [word, look] = { none: ["not scored", "bad"], 1: ["▲ above the group's mean", "above"], "-1": ["▼ below the group's mean", "below"], 0: ["as the group's mean", "even"] }[side];
  const components = Object.entries(result.components ?? {});
  const facts = [
    ["answer read", result.extracted],
    ["verifier", result.reason],
    ["status", result.status === "scored" ? null : result.status],
    ["parts", components.length > 1 ? components.map(([name, value]) => `${name} ${number(value)}`).join(", ") : null],
    ["ended by", { stop: "its end token", length: "the length limit", abort: "an abort" }[record.finish_reason] ?? record.finish_reason],
    ["tokens", record.tokens],
    ["policy version", record.policy_version],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "div",
    { class: "completion" },
    h("p", { class: `reward ${look}` }, h("b", null, number(record.reward)), " ", h("span", null, word)),
    h("pre", { tabindex: "0" }, marked(record.completion ?? "", needle)),
    h("dl", null, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, marked(String(value), needle))]).flat()),
  );
}
