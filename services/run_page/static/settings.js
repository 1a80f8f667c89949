// The settings and outcomes of the runs, side by side.

import { byId, h } from "./dom.js";

const OUTCOME = "Outcome";

export class Settings {
  constructor() {
    this.filter = h("input", { type: "search", size: 20, placeholder: "name or value", oninput: () => this.draw() });
    this.onlyDifferent = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.different = h("label", { hidden: true }, this.onlyDifferent, " only what differs");
    this.table = h("div", { class: "scroll", tabindex: "0" });
    byId("settings").replaceChildren(
      h("div", { class: "controls" }, h("label", null, "Find ", this.filter), this.different),
      this.table,
    );
  }

  /** Shows the settings of ``runs``. */
  update(runs) {
    const signature = JSON.stringify(runs.map((run) => [run.settings, run.summary]));
    if (signature === this.signature) return;
    this.signature = signature;
    this.runs = runs;
    this.different.hidden = runs.length < 2;
    this.draw();
  }

  draw() {
    const needle = this.filter.value.toLowerCase();
    const bodies = [
      [OUTCOME, "summary"],
      ["Settings", "settings"],
    ].map(([title, part]) => {
      const names = [...new Set(this.runs.flatMap((run) => Object.keys(run[part])))];
      const rows = names.map((name) => [name, this.runs.map((run) => text(run[part][name]))]).filter(([name, values]) => {
        const differs = new Set(values).size > 1;
        const fits = [name, ...values].some((value) => value.toLowerCase().includes(needle));
        return fits && (differs || !this.onlyDifferent.checked);
      });
      if (!rows.length) return null;
      const head = h("tr", null, h("th", { scope: "rowgroup", colspan: this.runs.length + 1 }, title));
      return h("tbody", null, head, rows.map(([name, values]) => row(part === "settings" ? name.toUpperCase() : name, values)));
    });
    const heads = this.runs.length > 1 ? h("thead", null, h("tr", null, h("td"), this.runs.map((run) => h("th", { scope: "col" }, run.name)))) : null;
    this.table.replaceChildren(h("table", { class: "settings" }, [heads, ...bodies].filter((part) => part !== null)));
  }
}

function row(name, values) {
  const differs = new Set(values).size > 1;
  return h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, name), values.map((value) => h("td", null, value)));
}

function text(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
