// The plots of the page, with their common controls.

import { Chart } from "./chart.js";
import { runColor, seriesColor, valueOf } from "./colors.js";
import { byId, h, setText, show } from "./dom.js";
import { saveCsv } from "./download.js";
import { clock, count, number, some } from "./format.js";
import { Histogram } from "./histogram.js";
import { bounds, spread } from "./series.js";
import { GROUPS, PLOTS, plotOf } from "./specs.js";
import { View } from "./view.js";

const NOT_PLOTTED = new Set(["step", "time", "policy_version"]);
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [1, 2]];

export class Plots {
  /** Calls ``choose`` with a step to show its samples. */
  constructor(choose) {
    this.view = new View();
    this.choose = choose;
    this.runs = [];
    this.charts = new Map(PLOTS.map((spec) => [spec.id, new Chart(spec, this.view)]));
    this.histogram = new Histogram(() => this.histogram.update(this.shown(), this.cursorStep()));
    this.groups = GROUPS.map(({ title, plots }) => {
      const grid = h("div", { class: "grid" });
      const element = h("section", { "aria-label": title ?? "Most important" }, title && h("h2", null, title), grid);
      return { isFirst: title === null, element, grid, charts: plots.map(({ id }) => this.charts.get(id)) };
    });
    this.constantNames = h("summary");
    this.constantGrid = h("div", { class: "grid" });
    this.constant = h("details", { id: "constant" }, this.constantNames, this.constantGrid);
    this.more = h("div", { class: "grid" });
    this.others = h("details", null, h("summary", null, "Further metrics"), this.more);
    this.where = h("span", { class: "muted", id: "cursor" });
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.view.set({ range: null }) }, "Whole run");
    this.empty = h("p", { class: "muted", id: "no-curves" });
    this.head = this.controls();
    byId("plots").replaceChildren(h("div", { id: "summary" }), this.head, this.empty, ...this.groups.map(({ element }) => element), this.constant, this.others);
    this.view.addEventListener("view", () => this.redraw());
    this.view.addEventListener("emphasis", () => this.charts.forEach((chart) => chart.paintBase()));
    this.view.addEventListener("cursor", () => this.moveCursor());
    byId("plots").addEventListener("choose", () => this.view.cursor !== null && this.chooseCursor());
    for (const folded of [this.constant, this.others]) folded.addEventListener("toggle", () => this.redraw());
  }

  controls() {
    const change = (event) => this.view.set({ smoothing: Number(event.target.value) });
    const axis = (event) => {
      this.view.set({ axis: event.target.value, range: null, cursor: null });
      this.update(this.runs);
    };
    return h(
      "div",
      { class: "controls" },
      h("label", null, "Smoothing ", h("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: 0, oninput: change })),
      h("label", null, "Against ", h("select", { id: "axis", onchange: axis }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time"))),
      this.reset,
      h("button", { type: "button", onclick: () => this.save() }, "Save metrics as CSV"),
      this.where,
    );
  }

  shown() {
    return this.runs.filter((run) => run.isShown && run.length);
  }

  /** Saves the metrics of the shown runs, a line a step. */
  save() {
    const runs = this.shown();
    const names = [...new Set(runs.flatMap((run) => [...run.columns.keys()]))];
    const rows = runs.flatMap((run) =>
      run.column("step").map((_, at) => [run.name, ...names.map((name) => run.column(name)?.[at])]),
    );
    const name = runs.length === 1 ? runs[0].name : `${count(runs.length)}-runs`;
    saveCsv(`${name}-metrics.csv`, ["run", ...names], rows);
  }

  /** Shows the present data of ``runs``. */
  update(runs) {
    this.runs = runs;
    const shown = this.shown();
    for (const run of shown) run.color = valueOf(runColor(run.slot));
    for (const run of shown) if (run.parentIn(runs)) run.pairWith(run.parentIn(runs));
    // A single run without a step says in its summary why.
    const isUnticked = runs.length > 0 && !runs.some((run) => run.isShown);
    show(this.empty, !shown.length && runs.length !== 1);
    show(this.head, shown.length > 0);
    setText(this.empty, isUnticked ? "No run of the table above is ticked." : "No step yet.");
    const xs = new Map(shown.map((run) => [run, run.xs(this.view.axis)]));
    this.view.extent = bounds([...xs.values()], null, 0);
    const used = new Set(NOT_PLOTTED);
    for (const spec of PLOTS) this.place(spec, shown, xs, null, used);
    this.arrange(shown);
    const rest = new Set(shown.flatMap((run) => [...run.columns.keys()]).filter((name) => !used.has(name)));
    for (const name of [...rest].sort()) {
      this.place(plotOf(name), shown, xs, this.more, used);
    }
    show(this.others, rest.size > 0);
    this.histogram.update(shown, this.cursorStep());
  }

  place(spec, runs, xs, parent, used) {
    const compares = this.runs.length > 1;
    for (const [source, , around] of spec.series) {
      for (const run of runs) {
        for (const name of names(run, source)) for (const metric of [name, `${name}_stderr`, around?.(name), spec.within].flat()) used.add(metric);
      }
    }
    if (compares && spec.compared) used.add(spec.compared[0][0]);
    if (spec.id === "seconds") used.add("seconds_step");
    const lines = runs.flatMap((run) => this.lines(spec, run, xs.get(run), compares));
    let chart = this.charts.get(spec.id);
    if (chart) show(chart.element, lines.length > 0);
    if (!lines.length) return;
    if (!chart) {
      chart = new Chart(spec, this.view);
      this.charts.set(spec.id, chart);
      parent?.append(chart.element);
    }
    const isCut = spec.within && !lines.some((line) => line.isQuantile);
    const band = isCut ? { spread: "band: standard deviation, within the rewards that occurred" } : {};
    chart.spec = { ...spec, ...band, stacked: spec.stacked && !compares, isPartial: compares && Boolean(spec.compared) };
    chart.update(lines);
  }

  /** Puts the plots with data into their groups, and those outside the first group whose values never change into a fold. */
  arrange(runs) {
    const hasSteps = runs.some((run) => run.steps > 1);
    const folded = [];
    for (const { isFirst, element, grid, charts } of this.groups) {
      const used = charts.filter((chart) => !chart.element.hidden);
      const open = used.filter((chart) => isFirst || !hasSteps || !isConstant(chart.lines));
      folded.push(...used.filter((chart) => !open.includes(chart)));
      const elements = open.map((chart) => chart.element);
      // Beside the curve of the mean reward.
      if (isFirst) elements.splice(1, 0, this.histogram.element);
      fill(grid, elements);
      show(element, open.length > 0);
    }
    fill(this.constantGrid, folded.map((chart) => chart.element));
    const names = folded.map(({ spec, lines }) => `${spec.title} ${[...new Set(lines.map(({ ys }) => number(ys.find((y) => y !== null))))].join(" and ")}`);
    setText(this.constantNames, `${some(folded.length, "plot")} without a change: ${names.join(", ")}`);
    show(this.constant, folded.length > 0);
  }

  lines(spec, run, xs, compares) {
    const lines = [];
    for (const [source, label, around] of (compares && spec.compared) || spec.series) {
      for (const { name, ys } of columns(run, source)) {
        if (!ys.some((y) => y !== null)) continue;
        const steps = spec.sparse && run.column(spec.sparse);
        const values = steps ? ys.map((y, i) => y ?? (steps[i] === null ? null : 0)) : ys;
        const title = label ?? spec.name?.(name) ?? name;
        const place = lines.length;
        const look = compares
          ? { color: run.color, dash: DASHES[place % DASHES.length] }
          : { color: seriesColor(place), dash: [] };
        const entry = { key: title, label: title, ...look, color: compares ? "var(--muted)" : look.color };
        const extent = extents(run, around?.(name), spec.within, ys);
        const full = compares ? `${run.name}${place ? `: ${title}` : ""}` : title;
        lines.push({ label: full, run: run.name, xs, ys: values, ...extent, entry, ...look });
      }
    }
    return lines;
  }

  redraw() {
    show(this.reset, this.view.range !== null);
    for (const chart of this.charts.values()) if (!chart.element.hidden) chart.draw();
    this.histogram.draw();
  }

  moveCursor() {
    for (const chart of this.charts.values()) if (!chart.element.hidden) chart.drawCursor();
    const step = this.cursorStep();
    this.histogram.update(this.shown(), step);
    if (step === null) return;
    this.step = step;
    const [run] = this.shown();
    const time = run.column("time")?.[run.column("step").indexOf(step)];
    const text = step === 0 ? "step 0, before training" : `step ${count(step)}${time ? `, ${clock(time)}` : ""} `;
    const link = h("button", { type: "button", class: "link", onclick: () => this.choose(this.step) }, "its samples");
    this.where.replaceChildren(text, step === 0 ? "" : link);
  }

  /** Returns the first run's step at the cursor; null without one. */
  cursorStep() {
    const [run] = this.shown();
    const at = run && this.view.cursor !== null ? run.xs(this.view.axis).indexOf(this.view.cursor) : -1;
    return at < 0 ? null : run.column("step")[at];
  }

  chooseCursor() {
    if (this.step) this.choose(this.step);
  }
}

function names(run, source) {
  if (typeof source === "string") return [source];
  if (source instanceof RegExp) return [...run.columns.keys()].filter((name) => source.test(name));
  return source.needs.length > 1 ? [] : source.needs;
}

function columns(run, source) {
  if (typeof source === "object" && source.make) {
    const inputs = source.needs.map((name) => run.column(name));
    if (inputs.some((input) => !input)) return [];
    return [{ name: source.needs[0], ys: inputs[0].map((_, i) => source.make(...inputs.map((input) => input[i]))) }];
  }
  return names(run, source).flatMap((name) => (run.column(name) ? [{ name, ys: run.column(name) }] : []));
}

/**
 * Returns the columns of a band around ``ys``: ``spread``, a distance, for one metric, or ``ends``, low and high, for two.
 * In a run that lacks these two, the distance ``within`` gives the ends, cut at the lowest and the highest reward.
 */
function extents(run, metrics, within, ys) {
  if (!Array.isArray(metrics)) return { spread: metrics ? run.column(metrics) : null, ends: null };
  const ends = metrics.map((metric) => run.column(metric));
  if (ends.every(Boolean)) return { spread: null, ends, isQuantile: true };
  const [around, range] = [within && run.column(within), run.rewardRange];
  if (!around || !range) return { spread: null, ends: null };
  const { lower, upper } = spread(ys, around);
  const cut = (value) => (value === null ? null : Math.min(range[1], Math.max(range[0], value)));
  return { spread: null, ends: [lower.map(cut), upper.map(cut)] };
}

/** Returns whether each series has one value only, the same in all runs. */
function isConstant(lines) {
  const values = new Map();
  for (const { entry, ys } of lines) {
    for (const y of ys) if (y !== null) values.set(entry.key, (values.get(entry.key) ?? new Set()).add(y));
  }
  return [...values.values()].every((distinct) => distinct.size === 1);
}

/** Makes ``elements`` the children of ``parent``; moves only those that are elsewhere, because a plot that moves loses the focus. */
function fill(parent, elements) {
  for (const [n, element] of elements.entries()) if (parent.children[n] !== element) parent.insertBefore(element, parent.children[n] ?? null);
  while (parent.childElementCount > elements.length) parent.lastElementChild.remove();
}
