// One prompt over the steps that sampled it: a column of completions a step, the oldest first.

import { get } from "./api.js";
import { meanReward } from "./answers.js";
import { completions, question, strip } from "./cards.js";
import { h, show } from "./dom.js";
import { count, number, some } from "./format.js";

const PAGE = 20;

export class Followed {
  /** Calls ``fail`` with the error of a request, ``close`` to go back to all groups, ``open(group, place)`` for an answer. */
  constructor(fail, close, open) {
    this.fail = fail;
    this.openAnswer = open;
    this.isOpen = false;
    this.groups = [];
    this.head = h("div");
    this.older = h("button", { type: "button", hidden: true, onclick: () => this.read(this.before) }, "Earlier steps");
    this.columns = h("div", { class: "steps", tabindex: "0", role: "group", "aria-label": "completions by step" });
    const back = h("button", { type: "button", onclick: close }, "Back to all groups");
    this.element = h("div", { id: "followed", hidden: true }, h("div", { class: "controls" }, back, this.older), this.head, this.columns);
  }

  /** Shows the prompt of a ``group`` of ``run``, from its training or its evaluations. */
  open(run, source, group) {
    Object.assign(this, { isOpen: true, run, source, key: group.prompt_key, prompt: group, groups: [] });
    show(this.element, true);
    return this.read(null);
  }

  close() {
    this.isOpen = false;
    show(this.element, false);
  }

  /** Adds the steps that came since. */
  refresh() {
    return this.read(null);
  }

  /** Reads the newest groups of the prompt before ``before`` (null: from the end), and adds them to the shown ones. */
  async read(before) {
    const key = this.key;
    try {
      const groups = [];
      let next = before;
      do {
        const query = { run: this.run, source: this.source, prompt_key: key, before: next };
        const reply = await get("api/groups", { ...query, limit: PAGE - groups.length });
        groups.push(...reply.groups);
        next = reply.before;
      } while (next !== null && groups.length < PAGE);
      if (key !== this.key || !this.isOpen) return;
      const isFirst = !this.groups.length;
      const numbers = new Set(this.groups.map((group) => group.number));
      const added = groups.filter((group) => !numbers.has(group.number));
      for (const group of added) group.advantage = this.prompt.advantage;
      if (isFirst || before !== null) this.before = next;
      if (!added.length) return;
      this.groups = [...this.groups, ...added].sort((a, b) => a.number - b.number);
      this.draw();
    } catch (error) {
      this.fail(error);
    }
  }

  draw() {
    show(this.older, this.before !== null);
    const [first, last] = [this.groups[0], this.groups.at(-1)];
    const means = [...new Set([first, last])].map((group) => number(meanReward(group))).join(" → ");
    this.head.replaceChildren(
      ...question(this.prompt, "").filter(Boolean),
      h("p", { role: "status" }, `${some(this.groups.length, "group")}, steps ${count(first.step)} to ${count(last.step)}: mean reward ${means}`),
    );
    this.columns.replaceChildren(...this.groups.map((group) => column(group, this.openAnswer)));
  }
}

function column(group, open) {
  const mean = meanReward(group);
  const recorded = group.completions.map((record) => record.policy_version).filter((version) => version !== undefined);
  const versions = [...new Set(recorded)].sort((a, b) => a - b);
  return h(
    "section",
    { class: "card step", "aria-label": `step ${group.step}` },
    h("header", null, h("strong", null, `step ${count(group.step)}`), strip(group)),
    versions.length ? h("p", { class: "muted" }, `policy version ${versions.map(count).join(", ")}`) : null,
    h("p", null, "mean reward ", h("b", null, number(mean))),
    completions(group, "", open),
  );
}
