// One plot: lines or stacked areas on a canvas, with a second canvas above for the cursor.

import { caption, saveButton, swatch } from "./caption.js";
import { color } from "./colors.js";
import { h, setText, show } from "./dom.js";
import { count, duration, number } from "./format.js";
import { Plane, disc, line, paintArea, paintAxes, paintErrors, paintLine, size, within } from "./paint.js";
import { savePicture } from "./picture.js";
import { bounds, nearest, smooth, spread, stack } from "./series.js";

export const HEIGHT = 200;
const DRAG_PIXELS = 6;
const NEAR = "300px";
const FADED = 0.15;
const MOST_LISTED = 12;
const MOST_SPREADS = 3;

export class Chart {
  /** ``spec``: id, title, unit, note, stacked, markers. ``update`` gives the lines. */
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.lines = [];
    this.hidden = new Set();
    this.base = h("canvas", { "aria-hidden": "true" });
    this.top = h("canvas", { class: "top", tabindex: "0", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.unit = h("span", { class: "muted" }, spec.unit);
    this.legend = h("div", { class: "legend" });
    this.spoken = h("p", { class: "spoken", "aria-live": "polite" });
    this.frame = h("div", { class: "frame" }, this.base, this.top, this.tip);
    this.element = h(
      "figure",
      { id: `plot-${spec.id}`, class: "card" },
      caption(spec.title, this.unit),
      spec.note ? h("p", { class: "note" }, spec.note) : null,
      this.legend,
      this.frame,
      this.spoken,
      saveButton(spec.title, () => this.save()),
    );
    this.listen();
  }

  /** Takes new lines: [{label, color, dash, xs, ys, spread, ends, entry}], ys with null for gaps. ``entry`` is the legend's key. */
  update(lines) {
    this.lines = lines;
    this.isCrowded = new Set(lines.map((line) => line.run)).size > MOST_SPREADS;
    this.showLegend();
    setText(this.unit, this.inUnit());
    this.draw();
  }

  /** Returns the unit, and what the bands or bars are if there are any. */
  inUnit() {
    return [this.spec.unit, this.isCrowded ? null : this.spec.spread].filter(Boolean).join(", ");
  }

  showLegend() {
    const entries = new Map(this.lines.map((line) => [line.entry.key, line.entry]));
    // With several runs, a plot may show only one of its series, which its title does not say.
    const isNeeded = entries.size > 1 || this.spec.isPartial;
    const signature = [isNeeded, ...[...entries.values()].map((e) => `${e.key} ${e.color} ${e.dash}`)].join("\n");
    if (signature === this.legendSignature) return;
    this.legendSignature = signature;
    show(this.legend, isNeeded);
    this.legend.replaceChildren(
      ...[...entries.values()].map((entry) => {
        const pressed = !this.hidden.has(entry.key);
        const toggle = (event) => {
          if (!this.hidden.delete(entry.key)) this.hidden.add(entry.key);
          event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(entry.key)));
          this.draw();
        };
        return h("button", { type: "button", "aria-pressed": String(pressed), onclick: toggle }, swatch(entry), entry.label);
      }),
    );
  }

  listen() {
    const top = this.top;
    let from = null;
    top.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        from = event.offsetX;
        top.setPointerCapture(event.pointerId);
      } else if (event.pointerType !== "mouse") this.point(event.offsetX);
    });
    top.addEventListener("pointermove", (event) => {
      this.selection = from !== null && Math.abs(event.offsetX - from) > DRAG_PIXELS ? [from, event.offsetX] : null;
      this.point(event.offsetX);
    });
    top.addEventListener("pointerup", () => {
      const selected = this.selection;
      from = this.selection = null;
      if (selected) this.view.set({ range: selected.map((x) => this.plane.valueAt(x)).sort((a, b) => a - b) });
    });
    top.addEventListener("pointercancel", () => (from = this.selection = null));
    top.addEventListener("pointerleave", () => this.view.set({ cursor: null }));
    top.addEventListener("dblclick", () => this.view.set({ range: null }));
    top.addEventListener("blur", () => this.view.set({ cursor: null }));
    top.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
    const observer = new IntersectionObserver(([entry]) => {
      this.isNear = entry.isIntersecting;
      this.paintBase();
    }, { rootMargin: NEAR });
    observer.observe(this.frame);
  }

  /** Moves the cursor to the step nearest to a pixel. */
  point(pixel) {
    const x = nearest(this.positions(), this.plane.valueAt(pixel));
    if (x !== null && (x !== this.view.cursor || this.selection)) this.view.set({ cursor: x });
  }

  key(event) {
    const positions = this.positions();
    if (!positions.length) return;
    const [first, last] = this.plane.range;
    const at = this.view.cursor === null ? positions.length - 1 : positions.indexOf(nearest(positions, this.view.cursor));
    const stride = event.shiftKey ? Math.max(1, Math.round(positions.length / 20)) : 1;
    const targets = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: positions.length - 1 };
    if (event.key in targets) {
      const target = this.view.cursor === null && event.key !== "Home" ? at : targets[event.key];
      this.view.set({ cursor: positions[Math.min(positions.length - 1, Math.max(0, target))] });
      setText(this.spoken, this.describe());
    } else if (event.key === "+" || event.key === "-") {
      const middle = this.view.cursor ?? (first + last) / 2;
      const factor = event.key === "+" ? 0.5 : 2;
      this.view.set({ range: [middle - (middle - first) * factor, middle + (last - middle) * factor] });
    } else if (event.key === "0" || event.key === "Escape") this.view.set({ range: null });
    else if (event.key === "Enter") this.element.dispatchEvent(new CustomEvent("choose", { bubbles: true }));
    else return;
    event.preventDefault();
  }

  visible() {
    return this.lines.filter((line) => !this.hidden.has(line.entry.key));
  }

  /** Returns the x of every step in the range at which any line has a value. */
  positions() {
    if (this.steps) return this.steps;
    const [first, last] = this.plane.range;
    const all = new Set();
    for (const { xs, ys } of this.visible()) {
      xs.forEach((x, i) => x !== null && ys[i] !== null && x >= first && x <= last && all.add(x));
    }
    return (this.steps = [...all].sort((a, b) => a - b));
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    for (const canvas of [this.base, this.top]) size(canvas, width, HEIGHT);
    this.steps = null;
    this.drawn = this.visible().map((line) => this.prepared(line));
    if (this.spec.stacked) stack(this.drawn);
    this.plane = this.planeOf(width, HEIGHT);
    this.paintBase();
    const name = `${this.spec.title}, ${this.inUnit()}.`;
    this.top.setAttribute("aria-label", `${name} ${this.describe()} Arrow keys move along the steps.`);
    this.drawCursor();
  }

  /** Returns a line with the arrays to draw: ``smooth``, and ``lower`` and ``upper`` if it has a spread or ends. */
  prepared(line) {
    if (this.spec.stacked) return line;
    const even = (values) => smooth(values, this.view.smoothing);
    const smoothed = even(line.ys);
    if (this.isCrowded) return { ...line, smooth: smoothed };
    const [lower, upper] = line.ends?.map(even) ?? [];
    const edges = line.ends ? { lower, upper } : line.spread && spread(smoothed, even(line.spread));
    return { ...line, smooth: smoothed, ...edges };
  }

  planeOf(width, height) {
    let range = this.view.range ?? this.view.extent ?? [0, 1];
    if (range[0] === range[1]) range = [range[0] - 0.5, range[1] + 0.5];
    const drawn = this.drawn.flatMap((line) =>
      [this.spec.stacked ? null : line.ys, line.smooth, line.lower, line.upper].filter(Boolean).map((ys) => ({ xs: line.xs, ys })),
    );
    const heights = bounds(drawn.map(({ ys }) => ys), { xs: drawn.map(({ xs }) => xs), range }, 0.06) ?? [0, 1];
    return new Plane(width, height, range, this.spec.stacked ? [0, heights[1]] : heights);
  }

  /** Paints the plot if it is in the window or near; dozens of plots of dozens of runs would keep the page waiting. */
  paintBase() {
    if (!this.isNear || !this.plane) return;
    const context = this.base.getContext("2d");
    context.clearRect(0, 0, this.plane.width, HEIGHT);
    this.paint(context, this.plane);
  }

  paint(context, plane) {
    const { stacked, markers, whole } = this.spec;
    const isTime = this.view.axis === "time";
    const xAxis = isTime ? { name: "time", label: duration } : { name: "step", whole: true };
    paintAxes(context, plane, { ...xAxis, wholeHeights: whole });
    within(context, plane, () => {
      for (const line of this.drawn) {
        if (stacked) {
          paintArea(context, plane, line, line.lower, line.upper, 0.75);
          continue;
        }
        if (line.lower && markers) paintErrors(context, plane, line, line.lower, line.upper);
        else if (line.lower) paintArea(context, plane, line, line.lower, line.upper, 0.14);
        const alpha = [null, line.run].includes(this.view.emphasis) ? 1 : FADED;
        if (this.view.smoothing > 0) paintLine(context, plane, line, line.ys, { alpha: 0.25 * alpha, width: 1, markers });
        paintLine(context, plane, line, line.smooth, { alpha, markers });
      }
    });
  }

  save() {
    const runs = new Set(this.drawn.map((line) => line.run));
    savePicture(this.spec.id, {
      title: this.spec.title,
      unit: runs.size > 1 ? this.inUnit() : `${this.inUnit()} · ${[...runs]}`,
      entries: this.drawn,
      paint: (context, width, height) => this.paint(context, this.planeOf(width, height)),
    });
  }

  /** Returns the lines' values at ``x``; null: at their newest step. */
  valuesAt(x) {
    return (this.drawn ?? [])
      .map((line) => {
        const at = x === null ? line.ys.findLastIndex((y) => y !== null) : this.placeOf(line, x);
        const [place, value, around] = [line.xs, line.ys, line.spread].map((values) => values?.[at] ?? null);
        const ends = line.ends?.map((values) => values[at] ?? null) ?? null;
        return { line, x: place, value, spread: around, ends, smooth: line.smooth?.[at] };
      })
      .filter((entry) => entry.value !== null);
  }

  /** Returns the index of ``x`` in a line. On the time axis, runs have no common moments, so the nearest step counts. */
  placeOf(line, x) {
    if (this.view.axis === "step") return line.xs.indexOf(x);
    const near = nearest(line.xs, x);
    const { range } = this.plane;
    return near !== null && Math.abs(near - x) <= (range[1] - range[0]) / 50 ? line.xs.indexOf(near) : -1;
  }

  describe() {
    const values = this.valuesAt(this.view.cursor);
    if (!values.length) return "No value.";
    const texts = values.map((entry) => `${entry.line.label} ${inWords(entry)}`);
    const places = values.map(({ x }) => this.view.place(x));
    // Without a cursor, each line tells its newest value, and runs may be at different steps.
    if (new Set(places).size > 1) return `${texts.map((words, n) => `${words} at ${places[n]}`).join(", ")}.`;
    return `${places[0]}: ${texts.join(", ")}.`;
  }

  drawCursor() {
    if (!this.plane) return;
    const context = this.top.getContext("2d");
    const { plane } = this;
    context.clearRect(0, 0, plane.width, plane.height);
    const { cursor } = this.view;
    const values = cursor === null ? [] : this.valuesAt(cursor);
    const isWithin = cursor !== null && cursor >= plane.range[0] && cursor <= plane.range[1];
    show(this.tip, isWithin && values.length > 0 && this.isActive());
    if (this.selection) {
      context.fillStyle = "rgb(128 128 128 / 0.25)";
      const [a, b] = this.selection;
      context.fillRect(Math.min(a, b), plane.top, Math.abs(b - a), plane.plotHeight);
    }
    if (!isWithin) return;
    const x = plane.x(cursor);
    context.strokeStyle = color("--muted");
    context.setLineDash([3, 3]);
    line(context, x, plane.top, x, plane.top + plane.plotHeight);
    context.setLineDash([]);
    if (!this.spec.stacked) {
      for (const { line: series, value, smooth: smoothed } of values) {
        context.fillStyle = series.color;
        disc(context, x, plane.y(this.view.smoothing > 0 ? smoothed : value), 3.5);
      }
    }
    if (!this.tip.hidden) this.placeTip(x, values, plane.width);
  }

  isActive() {
    return this.top.matches(":hover") || this.top.matches(":focus");
  }

  placeTip(x, values, width) {
    const listed = values.length > MOST_LISTED ? [...values].sort((a, b) => b.value - a.value).slice(0, MOST_LISTED) : values;
    const rows = listed.map((entry) =>
      h("div", null, swatch(entry.line), h("span", null, entry.line.label), h("b", null, inWords(entry))),
    );
    const rest = values.length > listed.length ? h("div", { class: "muted" }, `and ${count(values.length - listed.length)} lower`) : "";
    this.tip.replaceChildren(h("div", { class: "muted" }, this.view.place(this.view.cursor)), ...rows, rest);
    const left = x + 14 + this.tip.offsetWidth > width ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}

function inWords({ value, spread: around, ends }) {
  if (ends?.every((end) => end !== null)) return `${number(value)} (${ends.map((end) => number(end)).join(" to ")})`;
  return around === null ? number(value) : `${number(value)} ± ${number(around, 2)}`;
}
