// The table of several runs: sorted by a column, filtered by words, with a box for each run whose curves are drawn.

import { runColor } from "./colors.js";
import { differences, equals, settingsOf } from "./differences.js";
import { h, setText } from "./dom.js";
import { count, date, duration, some } from "./format.js";
import { change, interval } from "./summary.js";

const CHOSEN_AT_FIRST = 8;
const MOST_SETTINGS = 8;

// A column is {title, value, show}: ``value`` sorts the runs, ``show`` is its text.
const COLUMNS = [
  { title: "run", value: (run) => run.name },
  { title: "state", value: (run) => run.state },
  { title: "steps", value: (run) => run.steps, show: (run) => count(run.steps) },
  { title: "reward", value: (run) => run.rewards[1] ?? run.rewards[0], show: (run) => change(run.rewards) },
  { title: "accuracy", value: (run) => run.accuracies[1] ?? run.accuracies[0], show: accuracy },
  { title: "training time", value: (run) => run.summary.seconds, show: (run) => duration(run.summary.seconds) },
  { title: "last step", value: (run) => run.written, show: (run) => date(run.written) },
];

export class Comparison {
  /** Calls ``changed`` when the curves of other runs are to be drawn, and ``emphasise(run)`` with the run pointed at or null. */
  constructor(changed, emphasise) {
    this.changed = changed;
    this.emphasise = emphasise;
    this.runs = [];
    this.columns = [];
    this.rows = new Map();
    this.sort = { title: "last step", descending: true };
    this.filter = h("input", { type: "search", placeholder: "words, or SEED=1", oninput: () => this.refilter() });
    this.all = h("input", { type: "checkbox", "aria-label": "show all listed runs", onchange: () => this.chooseAll() });
    this.state = h("span", { class: "muted", role: "status" });
    this.more = h("a", { href: "#settings", hidden: true });
    this.head = h("tr");
    this.body = h("tbody", { onpointerleave: () => emphasise(null), onfocusout: () => emphasise(null) });
    const table = h("table", { class: "runs" }, h("thead", null, this.head), this.body);
    this.element = h(
      "div",
      { id: "comparison" },
      h("div", { class: "controls" }, h("label", null, "Filter ", this.filter), this.state, this.more),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "runs" }, table),
    );
  }

  /** Takes the runs with their new overviews; at first, chooses the newest. */
  take(runs) {
    const isFirst = !this.runs.length;
    this.runs = runs;
    this.differing = differences(runs);
    this.equals = equals(runs, this.differing);
    this.texts = new Map(runs.map((run) => [run, this.textOf(run)]));
    this.settings = new Map(runs.map((run) => [run, new Set([...settingsOf(run)].map(([key, value]) => `${key.split(" ")[1]}=${value}`.toLowerCase()))]));
    const settings = this.differing.slice(0, MOST_SETTINGS).map(({ name, values }) => ({ title: name, value: (run) => sortable(values.get(run)), show: (run) => values.get(run) ?? "" }));
    this.more.hidden = this.differing.length <= MOST_SETTINGS;
    setText(this.more, `All ${count(this.differing.length)} settings that differ`);
    this.columns = [...COLUMNS, ...settings];
    if (isFirst) {
      const newest = [...runs].sort((a, b) => (b.written ?? 0) - (a.written ?? 0)).slice(0, CHOSEN_AT_FIRST);
      for (const run of newest) this.choose(run, true);
    }
    const titles = JSON.stringify(this.columns.map(({ title }) => title));
    if (titles !== this.titles) {
      this.titles = titles;
      this.rows.clear();
      this.drawHead();
    }
  }

  /** Returns the text in which the filter finds words. */
  textOf(run) {
    return [run.name, run.state, ...this.differing.map(({ values }) => values.get(run) ?? "")].join("\n").toLowerCase();
  }

  drawHead() {
    const cells = this.columns.map(({ title }, n) => {
      const button = h("button", { type: "button", onclick: () => this.sortBy(title) }, title);
      return h("th", { scope: "col" }, n ? null : this.all, button);
    });
    this.head.replaceChildren(...cells);
  }

  sortBy(title) {
    const isAgain = this.sort.title === title;
    const isNumber = this.runs.some((run) => typeof this.column(title).value(run) === "number");
    this.sort = { title, descending: isAgain ? !this.sort.descending : isNumber };
    this.update();
  }

  column(title) {
    return this.columns.find((column) => column.title === title) ?? this.columns[0];
  }

  choose(run, isChosen) {
    if (isChosen === (run.slot !== null)) return;
    const slots = new Set(this.runs.map((other) => other.slot));
    let slot = 0;
    while (slots.has(slot)) slot++;
    run.slot = isChosen ? slot : null;
    run.isShown = isChosen && this.isListed(run);
  }

  chooseAll() {
    for (const run of this.listed()) this.choose(run, this.all.checked);
    this.update();
    this.changed();
  }

  refilter() {
    for (const run of this.runs) run.isShown = run.slot !== null && this.isListed(run);
    this.update();
    this.changed();
  }

  isListed(run) {
    const words = this.filter.value.toLowerCase().split(/\s+/);
    return words.every((word) => (word.includes("=") ? this.settings.get(run).has(word) : this.texts.get(run).includes(word)));
  }

  /** Returns the runs that the filter admits, in the table's order. */
  listed() {
    const { value } = this.column(this.sort.title);
    const sign = this.sort.descending ? -1 : 1;
    return this.runs.filter((run) => this.isListed(run)).sort((a, b) => ordered(value(a), value(b), sign) || ordered(a.name, b.name, 1));
  }

  /** Shows the present figures. */
  update() {
    const listed = this.listed();
    const focused = document.activeElement;
    for (const run of listed) this.updateRow(run);
    const rows = listed.map((run) => this.rows.get(run).row);
    const isMoved = rows.length !== this.body.childElementCount || rows.some((row, n) => row !== this.body.children[n]);
    if (isMoved) {
      this.body.replaceChildren(...rows);
      if (this.body.contains(focused)) focused.focus();
    }
    for (const [n, cell] of [...this.head.children].entries()) {
      const isSorted = this.columns[n].title === this.sort.title;
      if (isSorted) cell.setAttribute("aria-sort", this.sort.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    const shown = listed.filter((run) => run.slot !== null).length;
    this.all.checked = listed.length > 0 && shown === listed.length;
    this.all.indeterminate = shown > 0 && shown < listed.length;
    setText(this.state, `${count(listed.length)} of ${some(this.runs.length, "run")}, ${count(shown)} in the plots`);
  }

  updateRow(run) {
    if (!this.rows.has(run)) this.rows.set(run, this.makeRow(run));
    const { box, swatch, note, cells } = this.rows.get(run);
    box.checked = run.slot !== null;
    swatch.style.setProperty("--swatch", run.slot === null ? "transparent" : runColor(run.slot));
    const same = this.equals.get(run) ?? [];
    const equal = same.length > 1 ? `same settings as ${count(same.length)} others` : same.length ? `same settings as ${same[0].name}` : "";
    setText(note, [run.familyIn(this.runs), run.isOver && run.error, ...run.damage, equal].filter(Boolean).join("; "));
    for (const [n, cell] of cells.entries()) {
      const { value, show } = this.columns[n + 1];
      setText(cell, show ? show(run) : value(run));
      if (this.columns[n + 1].title === "state") cell.className = run.state === "failed" ? "failed" : "";
    }
  }

  makeRow(run) {
    const onchange = () => {
      this.choose(run, box.checked);
      this.update();
      this.changed();
    };
    const box = h("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange });
    const swatch = h("i", { class: "swatch" });
    const note = h("span", { class: "note" });
    const cells = this.columns.slice(1).map(() => h("td"));
    const first = h("th", { scope: "row" }, h("label", null, box, swatch, h("span", null, run.name)), note);
    const point = () => this.emphasise(run);
    return { box, swatch, note, cells, row: h("tr", { onpointerenter: point, onfocusin: point }, first, cells) };
  }
}

/** Returns a run's accuracies with the interval of the newest. */
function accuracy(run) {
  const about = interval(run.accuracyInterval);
  return `${change(run.accuracies)}${about && ` (${about})`}`;
}

/** Returns a setting's text as a number if it is one. */
function sortable(text) {
  return text === undefined || text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);
}

/** Compares two values of a column; missing ones come last in either direction of ``sign``. */
function ordered(a, b, sign) {
  const [isNone, isOther] = [a ?? null, b ?? null].map((value) => value === null);
  if (isNone || isOther) return isNone - isOther;
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}
