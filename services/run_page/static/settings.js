// The outcomes of the runs and their components' settings, package versions and commits, side by side.

import { text } from "./differences.js";
import { byId, h } from "./dom.js";
import { date } from "./format.js";

export class Settings {
  constructor() {
    const box = () => h("input", { type: "checkbox", onchange: () => this.draw() });
    this.filter = h("input", { type: "search", size: 20, placeholder: "name or value", oninput: () => this.draw() });
    this.onlyChanged = box();
    this.onlyChanged.checked = true;
    this.onlyDifferent = box();
    this.different = h("label", { hidden: true }, this.onlyDifferent, " only what differs");
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "settings by component" });
    byId("settings").replaceChildren(
      h(
        "div",
        { class: "controls" },
        h("label", null, "Find ", this.filter),
        h("label", null, this.onlyChanged, " only what is ", h("span", { class: "changed" }, "not the default")),
        this.different,
      ),
      this.table,
    );
  }

  /** Shows the outcomes and components of ``runs``. */
  update(runs) {
    const signature = JSON.stringify(runs.map((run) => [run.components, run.summary, run.state]));
    if (signature === this.signature) return;
    this.signature = signature;
    this.runs = runs;
    this.different.hidden = runs.length < 2;
    this.draw();
  }

  draw() {
    const bodies = parts(this.runs).map(({ title, rows, isOfSettings }) => {
      const shown = rows.filter((row) => this.isShown(row, isOfSettings));
      if (!shown.length) return null;
      const head = h("tr", null, h("th", { scope: "rowgroup", colspan: this.runs.length + 1 }, title));
      return h("tbody", null, head, shown.map(drawn));
    });
    const names = this.runs.map((run) => h("th", { scope: "col" }, run.name));
    const heads = this.runs.length > 1 ? h("thead", null, h("tr", null, h("td"), names)) : null;
    this.table.replaceChildren(h("table", { class: "settings" }, [heads, ...bodies].filter((part) => part !== null)));
  }

  isShown({ name, cells }, isOfSettings) {
    const needle = this.filter.value.toLowerCase();
    if (isOfSettings && this.onlyChanged.checked && !cells.some((cell) => cell.isChanged) && !differ(cells)) return false;
    if (this.onlyDifferent.checked && this.runs.length > 1 && !differ(cells)) return false;
    return [name, ...cells.map((cell) => cell.text)].some((value) => value.toLowerCase().includes(needle));
  }
}

/** Returns the parts of the table: titles, and rows with a cell a run. */
function parts(runs) {
  const components = union(runs.map((run) => run.components));
  return [
    ...components.map((name) => ({
      title: `Settings of ${name}`,
      isOfSettings: true,
      rows: rowsOf(runs, (run) => run.components[name]?.settings, (run) => run.components[name]?.changed).map((row) => ({
        ...row,
        name: row.name.toUpperCase(),
      })),
    })),
    { title: "Outcome", rows: rowsOf(runs, outcome).filter(({ cells }) => cells.some((cell) => cell.text)) },
    ...components.map((name) => ({
      title: `Versions in ${name}`,
      rows: rowsOf(runs, ({ components: { [name]: component } }) => component && versions(component)),
    })),
  ];
}

/** Returns a run's state and the other entries of its summary. */
function outcome({ state, summary }) {
  const { status, ended, ...rest } = summary;
  const values = { state, ...rounded(rest), ended: ended && date(ended) };
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name.replaceAll("_", " "), value]));
}

/** Returns the values with four significant digits for fractions, and large numbers whole. */
function rounded(values) {
  const round = (value) => (Math.abs(value) >= 1e4 ? Math.round(value) : Number(value.toPrecision(4)));
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, typeof value === "number" ? round(value) : value]));
}

function versions({ commit, packages }) {
  return { ...(commit ? { commit } : {}), ...packages };
}

function rowsOf(runs, values, changed = () => []) {
  const cell = (run, name) => ({
    text: text(values(run)?.[name]),
    isRecorded: values(run) !== undefined,
    isChanged: (changed(run) ?? []).includes(name),
  });
  return union(runs.map((run) => values(run) ?? {})).map((name) => ({ name, cells: runs.map((run) => cell(run, name)) }));
}

function drawn({ name, cells }) {
  const cell = ({ text, isChanged }) => h("td", { class: isChanged ? "changed" : null, title: isChanged ? "not the default" : null }, text);
  return h("tr", { class: differ(cells) ? "differs" : null }, h("th", { scope: "row" }, name), cells.map(cell));
}

/** Returns whether a row's values differ; a run that failed before it recorded a component does not differ in it. */
function differ(cells) {
  return new Set(cells.filter((cell) => cell.isRecorded).map((cell) => cell.text)).size > 1;
}

/** Returns the names in any of ``objects``, in their order. */
function union(objects) {
  return [...new Set(objects.flatMap((object) => Object.keys(object)))];
}
