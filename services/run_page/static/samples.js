// The browser of samples: groups, newest first, with their completions side by side; or one prompt over the steps.

import { get } from "./api.js";
import { BY_MEAN, card } from "./cards.js";
import { byId, h, setText, show } from "./dom.js";
import { save, saveCsv } from "./download.js";
import { Followed } from "./followed.js";
import { count, some } from "./format.js";
import { Reader } from "./reader.js";

const PAGE = 6;
const advantageOf = (run) => run.settings.advantage ?? "grpo";

export class Samples {
  /** Calls ``fail`` with the error of a request. */
  constructor(fail) {
    this.fail = fail;
    this.runs = [];
    this.list = h("div", { id: "groups" });
    this.state = h("p", { class: "muted", role: "status", id: "samples-state" });
    this.older = h("button", { type: "button", hidden: true, onclick: () => this.search(this.before) }, "Older groups");
    this.fresh = h("button", { type: "button", hidden: true, onclick: () => this.start() }, "Show the newest");
    this.form = this.makeForm();
    this.groups = [];
    const all = h("button", { type: "button", class: "link", onclick: () => this.showAll() }, "Show all groups");
    this.why = h("p", { id: "only-mixed" }, "Only groups whose rewards differ: where all rewards are equal, GRPO has nothing to learn from. ", all);
    this.browser = h("div", null, this.form, this.why, this.fresh, this.list, this.state, this.older);
    this.reader = new Reader(fail);
    this.open = (group, place) => this.reader.open(this.run.value, this.source.value, group, place);
    this.followed = new Followed(fail, () => this.follow(null), this.open);
    byId("samples").replaceChildren(this.saving(), this.browser, this.followed.element, this.reader.element);
    this.search_ = 0;
  }

  makeForm() {
    const field = (label, properties) => h("label", null, label, " ", h("input", properties));
    this.run = h("select", { name: "run", "aria-label": "run" });
    this.source = h("select", { name: "source" }, h("option", { value: "training" }, "training"), h("option", { value: "evaluation" }, "evaluations"));
    const form = h(
      "form",
      { class: "controls", id: "samples-form", onsubmit: (event) => event.preventDefault() },
      this.run,
      h("label", null, "From ", this.source),
      field("Text", { name: "text", type: "search", placeholder: "in prompts and completions", size: 28 }),
      field("Steps", { name: "step_from", type: "number", min: 0, placeholder: "first", class: "short" }),
      field("to", { name: "step_to", type: "number", min: 0, placeholder: "last", class: "short" }),
      field("Reward", { name: "reward_from", type: "number", step: "any", placeholder: "lowest", class: "short" }),
      field("to", { name: "reward_to", type: "number", step: "any", placeholder: "highest", class: "short" }),
      h("label", null, "Groups ", h("select", { name: "spread" }, h("option", { value: "any" }, "all"), h("option", { value: "mixed", selected: true }, "whose rewards differ"), h("option", { value: "equal" }, "whose rewards are equal"))),
      h("label", null, h("input", { type: "checkbox", name: "recurring", value: "true" }), "of prompts sampled more than once"),
      h("button", { type: "reset", onclick: () => setTimeout(() => this.start()) }, "Clear"),
    );
    let wait;
    form.addEventListener("input", () => {
      this.isChosen = true;
      clearTimeout(wait);
      wait = setTimeout(() => this.start(), 250);
    });
    return form;
  }

  saving() {
    const button = (kind, write) => h("button", { type: "button", onclick: write }, `Save shown as ${kind}`);
    return h(
      "div",
      { class: "controls" },
      button("JSONL", () => save(this.fileName("jsonl"), this.records().map((record) => `${JSON.stringify(record)}\n`), "application/jsonl")),
      button("CSV", () => {
        const records = this.records();
        const names = [...new Set(records.flatMap(Object.keys))];
        saveCsv(this.fileName("csv"), names, records.map((record) => names.map((name) => record[name])));
      }),
    );
  }

  fileName(ending) {
    return `${this.run.value}-${this.source.value}-samples.${ending}`;
  }

  /** Returns the shown completions as lines of samples.jsonl, without their tokens. */
  records() {
    const groups = this.followed.isOpen ? this.followed.groups : this.groups;
    return groups.flatMap(({ number, prompt_key, groups_of_prompt, advantage, completions, ...shared }) =>
      completions.map(({ spans, ...completion }) => ({ ...shared, ...completion })),
    );
  }

  /** Shows the prompt of ``group`` over the steps; without a group, all groups again. */
  follow(group) {
    show(this.browser, group === null);
    if (group === null) this.followed.close();
    else this.followed.open(this.run.value, this.source.value, group);
  }

  /** Offers ``runs`` to choose from. */
  take(runs) {
    this.runs = runs;
    const names = runs.map((run) => run.name);
    if (names.join("\n") !== [...this.run.options].map((option) => option.value).join("\n")) {
      this.run.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    show(this.run, names.length > 1);
    if (!this.hasStarted && runs.some((run) => !BY_MEAN.has(advantageOf(run)))) this.form.elements.spread.value = "any";
  }

  showAll() {
    this.form.elements.spread.value = "any";
    this.start();
  }

  /** Shows the samples of one step. */
  choose(step) {
    this.follow(null);
    this.form.reset();
    this.form.elements.spread.value = "any";
    this.form.elements.step_from.value = this.form.elements.step_to.value = String(step);
    this.start();
  }

  /** Reads again, when the page becomes visible or the run has new samples. */
  async refresh() {
    if (!this.hasStarted) return this.start();
    if (this.followed.isOpen) return this.followed.refresh();
    try {
      const { total } = await get("api/groups", { run: this.run.value, source: this.source.value, limit: 1, before: 0 });
      const newer = total - this.total;
      show(this.fresh, newer > 0);
      setText(this.fresh, `Show ${some(newer, "newer group")}`);
    } catch (error) {
      this.fail(error);
    }
  }

  start() {
    this.hasStarted = true;
    show(this.fresh, false);
    this.groups = [];
    this.list.replaceChildren();
    return this.search(null);
  }

  /** Shows a page of groups before ``before``; repeats the request until the server has found enough. */
  async search(before) {
    const turn = ++this.search_;
    const query = Object.fromEntries(new FormData(this.form));
    // An evaluation has one completion of each prompt.
    if (query.source === "evaluation") query.spread = "any";
    show(this.why, query.spread === "mixed");
    let wanted = PAGE;
    show(this.older, false);
    try {
      do {
        const reply = await get("api/groups", { ...query, before, limit: wanted });
        if (turn !== this.search_) return;
        this.total = reply.total;
        before = reply.before;
        wanted -= reply.groups.length;
        const run = this.runs.find(({ name }) => name === query.run);
        for (const group of reply.groups) group.advantage = advantageOf(run);
        this.groups.push(...reply.groups);
        this.list.append(...reply.groups.map((group) => card(group, query.text, (chosen) => this.follow(chosen), this.open)));
        setText(this.state, this.describe(reply, wanted > 0 && before !== null));
      } while (wanted > 0 && before !== null);
      this.before = before;
      show(this.older, before !== null);
      // A run whose groups are all equal is the one whose samples must be read.
      if (!this.groups.length && this.total && query.spread === "mixed" && !this.isChosen) this.showAll();
    } catch (error) {
      if (turn === this.search_) this.fail(error);
    }
  }

  describe(reply, goesOn) {
    const groups = some(this.groups.length, "group");
    const step = count(reply.searched_to_step);
    if (!reply.total) return "No samples yet.";
    if (goesOn) return `${groups}; searching, at step ${step} …`;
    if (reply.before === null) return this.groups.length ? `${groups}, no more.` : "No group fits.";
    return `${groups}, down to step ${step}.`;
  }
}
