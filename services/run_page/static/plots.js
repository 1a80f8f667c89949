// The plots of the page, with their common controls.

import { Chart } from "./chart.js";
import { runColor, seriesColor, valueOf } from "./colors.js";
import { byId, h, setText, show } from "./dom.js";
import { saveCsv } from "./download.js";
import { clock, count } from "./format.js";
import { Histogram } from "./histogram.js";
import { bounds } from "./series.js";
import { PLOTS, plotOf } from "./specs.js";
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
    this.grid = h("div", { class: "grid" }, [...this.charts.values()].map((chart) => chart.element));
    // Beside the curve of the mean reward.
    this.charts.get("reward").element.after(this.histogram.element);
    this.more = h("div", { class: "grid" });
    this.others = h("details", null, h("summary", null, "Further metrics"), this.more);
    this.where = h("span", { class: "muted", id: "cursor" });
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.view.set({ range: null }) }, "Whole run");
    this.empty = h("p", { class: "muted", id: "no-curves" });
    byId("plots").replaceChildren(h("div", { id: "summary" }), this.controls(), this.empty, this.grid, this.others);
    this.view.addEventListener("view", () => this.redraw());
    this.view.addEventListener("emphasis", () => this.charts.forEach((chart) => chart.paintBase()));
    this.view.addEventListener("cursor", () => this.moveCursor());
    byId("plots").addEventListener("choose", () => this.view.cursor !== null && this.chooseCursor());
    this.others.addEventListener("toggle", () => this.redraw());
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
    show(this.empty, !shown.length);
    setText(this.empty, runs.some((run) => run.isShown) || !runs.length ? "No step yet." : "No run of the table above is ticked.");
    const xs = new Map(shown.map((run) => [run, run.xs(this.view.axis)]));
    this.view.extent = bounds([...xs.values()], null, 0);
    const used = new Set(NOT_PLOTTED);
    for (const spec of PLOTS) this.place(spec, shown, xs, this.grid, used);
    const rest = new Set(shown.flatMap((run) => [...run.columns.keys()]).filter((name) => !used.has(name)));
    for (const name of [...rest].sort()) {
      this.place(plotOf(name), shown, xs, this.more, used);
    }
    show(this.others, rest.size > 0);
    this.histogram.update(shown, this.cursorStep());
  }

  place(spec, runs, xs, parent, used) {
    const compares = this.runs.length > 1;
    for (const [source, , spread] of spec.series) {
      for (const run of runs) {
        for (const name of names(run, source)) for (const metric of [name, `${name}_stderr`, spread?.(name)].flat()) used.add(metric);
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
      parent.append(chart.element);
    }
    chart.spec = { ...spec, stacked: spec.stacked && !compares, isPartial: compares && Boolean(spec.compared) };
    chart.update(lines);
  }

  lines(spec, run, xs, compares) {
    const lines = [];
    for (const [source, label, around] of (compares && spec.compared) || spec.series) {
      for (const { name, ys } of columns(run, source)) {
        if (!ys.some((y) => y !== null)) continue;
        const steps = spec.sparse && run.column(spec.sparse);
        const values = steps ? ys.map((y, i) => y ?? (steps[i] === null ? null : 0)) : ys;
        const own = label ?? spec.name?.(name) ?? name;
        const place = lines.length;
        const look = compares
          ? { color: run.color, dash: DASHES[place % DASHES.length] }
          : { color: seriesColor(place), dash: [] };
        const entry = { key: own, label: own, ...look, color: compares ? "var(--muted)" : look.color };
        const [spread, ends] = extents(run, around?.(name));
        const full = compares ? `${run.name}${place ? `: ${own}` : ""}` : own;
        lines.push({ label: full, run: run.name, xs, ys: values, spread, ends, entry, ...look });
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

/** Returns the columns of a band: [distance, null] for one metric, [null, [low, high]] for two, null for what is missing. */
function extents(run, metrics) {
  if (!Array.isArray(metrics)) return [metrics ? run.column(metrics) : null, null];
  const ends = metrics.map((metric) => run.column(metric));
  return [null, ends.every(Boolean) ? ends : null];
}
