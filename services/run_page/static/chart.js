// One plot: lines or stacked areas on a canvas, with a second canvas above for the cursor.

import { color } from "./colors.js";
import { h, setText, show } from "./dom.js";
import { duration, number } from "./format.js";
import { bounds, decimate, nearest, smooth, stack, ticks } from "./series.js";

const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };
const HEIGHT = 200;
const DRAG_PIXELS = 6;

/** What all plots share: the x axis, its range, smoothing, and where the cursor is. */
export class View extends EventTarget {
  axis = "step";
  smoothing = 0;
  range = null;
  /** The whole range of x of what is shown. */
  extent = null;
  cursor = null;

  set(change) {
    Object.assign(this, change);
    this.dispatchEvent(new Event("cursor" in change && Object.keys(change).length === 1 ? "cursor" : "view"));
  }
}

export class Chart {
  /** ``spec``: id, title, unit, stacked, markers. ``lines`` come with ``update``. */
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.lines = [];
    this.hidden = new Set();
    this.base = h("canvas", { "aria-hidden": "true" });
    this.top = h("canvas", { class: "top", tabindex: "0", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("div", { class: "legend" });
    this.spoken = h("p", { class: "spoken", "aria-live": "polite" });
    this.frame = h("div", { class: "frame" }, this.base, this.top, this.tip);
    this.element = h(
      "figure",
      { id: `plot-${spec.id}`, class: "card" },
      h("figcaption", null, h("strong", null, spec.title), " ", h("span", { class: "muted" }, spec.unit ?? "")),
      this.legend,
      this.frame,
      this.spoken,
    );
    this.listen();
  }

  /** Takes new lines: [{label, color, dash, xs, ys, entry}], ys with null for gaps. ``entry`` is the legend's key. */
  update(lines) {
    this.lines = lines;
    this.showLegend();
    this.draw();
  }

  showLegend() {
    const entries = new Map(this.lines.map((line) => [line.entry.key, line.entry]));
    const signature = [...entries.values()].map((e) => `${e.key} ${e.color} ${e.dash}`).join("\n");
    if (signature === this.legendSignature) return;
    this.legendSignature = signature;
    show(this.legend, entries.size > 1);
    this.legend.replaceChildren(
      ...[...entries.values()].map((entry) => {
        const swatch = h("i", { class: "swatch" });
        swatch.style.setProperty("--swatch", entry.color);
        swatch.classList.toggle("dashed", entry.dash.length > 0);
        const pressed = !this.hidden.has(entry.key);
        const toggle = (event) => {
          if (!this.hidden.delete(entry.key)) this.hidden.add(entry.key);
          event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(entry.key)));
          this.draw();
        };
        return h("button", { type: "button", "aria-pressed": String(pressed), onclick: toggle }, swatch, entry.label);
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
      if (selected) this.view.set({ range: selected.map((x) => this.valueAt(x)).sort((a, b) => a - b) });
    });
    top.addEventListener("pointercancel", () => (from = this.selection = null));
    top.addEventListener("pointerleave", () => this.view.set({ cursor: null }));
    top.addEventListener("dblclick", () => this.view.set({ range: null }));
    top.addEventListener("blur", () => this.view.set({ cursor: null }));
    top.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  /** Puts the cursor to the step nearest to a pixel. */
  point(pixel) {
    const x = nearest(this.positions(), this.valueAt(pixel));
    if (x !== null && (x !== this.view.cursor || this.selection)) this.view.set({ cursor: x });
  }

  key(event) {
    const positions = this.positions();
    if (!positions.length) return;
    const [first, last] = this.range;
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

  /** The x of every step within the range that has a value, of all lines together. */
  positions() {
    if (this.steps) return this.steps;
    const [first, last] = this.range;
    const all = new Set();
    for (const { xs, ys } of this.visible()) {
      xs.forEach((x, i) => x !== null && ys[i] !== null && x >= first && x <= last && all.add(x));
    }
    return (this.steps = [...all].sort((a, b) => a - b));
  }

  valueAt(pixel) {
    const [first, last] = this.range;
    return first + ((pixel - MARGIN.left) / this.plotWidth) * (last - first);
  }

  x(value) {
    const [first, last] = this.range;
    return MARGIN.left + ((value - first) / (last - first || 1)) * this.plotWidth;
  }

  y(value) {
    const [low, high] = this.heights;
    return MARGIN.top + (1 - (value - low) / (high - low || 1)) * this.plotHeight;
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    for (const canvas of [this.base, this.top]) size(canvas, width, HEIGHT);
    this.plotWidth = width - MARGIN.left - MARGIN.right;
    this.plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
    const lines = this.visible();
    this.steps = null;
    this.range = this.view.range ?? this.view.extent ?? [0, 1];
    if (this.range[0] === this.range[1]) this.range = [this.range[0] - 0.5, this.range[1] + 0.5];
    const { smoothing } = this.view;
    this.drawn = lines.map((line) => ({ ...line, smooth: this.spec.stacked ? line.ys : smooth(line.ys, smoothing) }));
    if (this.spec.stacked) stack(this.drawn);
    const heights = bounds(
      this.drawn.flatMap((line) => (this.spec.stacked ? [line.upper] : [line.ys, line.smooth])),
      { xs: this.drawn.flatMap((line) => (this.spec.stacked ? [line.xs] : [line.xs, line.xs])), range: this.range },
      0.06,
    ) ?? [0, 1];
    this.heights = this.spec.stacked ? [0, heights[1]] : heights;
    this.paint(this.base.getContext("2d"));
    this.top.setAttribute("aria-label", `${this.spec.title}. ${this.describe()} Arrow keys move along the steps.`);
    this.drawCursor();
  }

  paint(context) {
    context.clearRect(0, 0, this.frame.clientWidth, HEIGHT);
    this.paintAxes(context, color("--line"), color("--muted"));
    context.save();
    context.beginPath();
    // Points on the edge are drawn whole.
    context.rect(MARGIN.left - 4, MARGIN.top - 4, this.plotWidth + 8, this.plotHeight + 8);
    context.clip();
    for (const line of this.drawn) {
      if (this.spec.stacked) this.paintArea(context, line);
      else {
        const isSmooth = this.view.smoothing > 0;
        if (isSmooth) this.paintLine(context, line, line.ys, 0.25, 1);
        this.paintLine(context, line, line.smooth, 1, 1.7);
      }
    }
    context.restore();
  }

  paintAxes(context, grid, text) {
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.strokeStyle = grid;
    context.fillStyle = text;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(...this.heights, 5)) {
      const y = Math.round(this.y(value)) + 0.5;
      line(context, MARGIN.left, y, MARGIN.left + this.plotWidth, y);
      context.fillText(number(value), MARGIN.left - 6, y);
    }
    context.textBaseline = "top";
    const seconds = this.view.axis === "time";
    for (const value of ticks(...this.range, Math.max(2, Math.floor(this.plotWidth / 50)), !seconds)) {
      const label = seconds ? duration(value) : number(value, 6);
      context.textAlign = this.x(value) > MARGIN.left + this.plotWidth - 14 ? "right" : "center";
      context.fillText(label, Math.min(this.x(value), MARGIN.left + this.plotWidth), HEIGHT - MARGIN.bottom + 6);
    }
  }

  paintLine(context, series, ys, alpha, width) {
    const points = decimate(series.xs, ys, this.range, this.plotWidth);
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = series.color;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.setLineDash(series.dash);
    context.beginPath();
    for (const [i, [x, y]] of points.entries()) context[i ? "lineTo" : "moveTo"](this.x(x), this.y(y));
    context.stroke();
    context.setLineDash([]);
    if (this.spec.markers || points.length < 30) {
      for (const [x, y] of points) disc(context, this.x(x), this.y(y), this.spec.markers ? 3 : 2);
    }
    context.globalAlpha = 1;
  }

  paintArea(context, series) {
    const upper = decimate(series.xs, series.upper, this.range, this.plotWidth);
    const lower = decimate(series.xs, series.lower, this.range, this.plotWidth);
    context.beginPath();
    for (const [i, [x, y]] of upper.entries()) context[i ? "lineTo" : "moveTo"](this.x(x), this.y(y));
    for (const [x, y] of lower.reverse()) context.lineTo(this.x(x), this.y(y));
    context.closePath();
    context.fillStyle = series.color;
    context.globalAlpha = 0.75;
    context.fill();
    context.globalAlpha = 1;
  }

  /** What stands at the cursor, or at the newest step. */
  valuesAt(x) {
    return (this.drawn ?? [])
      .map((line) => {
        const at = x === null ? line.ys.findLastIndex((y) => y !== null) : this.placeOf(line, x);
        return { line, x: line.xs[at] ?? null, value: at < 0 ? null : line.ys[at], smooth: line.smooth?.[at] };
      })
      .filter((entry) => entry.value !== null && entry.value !== undefined);
  }

  /** Where in a line ``x`` is. Of several runs over time, no two have a step at the same moment: the nearest counts. */
  placeOf(line, x) {
    if (this.view.axis === "step") return line.xs.indexOf(x);
    const near = nearest(line.xs, x);
    return near !== null && Math.abs(near - x) <= (this.range[1] - this.range[0]) / 50 ? line.xs.indexOf(near) : -1;
  }

  describe() {
    const values = this.valuesAt(this.view.cursor);
    if (!values.length) return "No value.";
    const at = values[0].x;
    const where = this.view.axis === "time" ? duration(at) : `step ${at}`;
    return `${where}: ${values.map(({ line, value }) => `${line.label} ${number(value)}`).join(", ")}.`;
  }

  drawCursor() {
    const context = this.top.getContext("2d");
    const width = this.frame.clientWidth;
    context.clearRect(0, 0, width, HEIGHT);
    const { cursor } = this.view;
    const values = cursor === null ? [] : this.valuesAt(cursor);
    const isWithin = cursor !== null && this.range && cursor >= this.range[0] && cursor <= this.range[1];
    show(this.tip, isWithin && values.length > 0 && this.isActive());
    if (this.selection) {
      context.fillStyle = "rgb(128 128 128 / 0.25)";
      const [a, b] = this.selection;
      context.fillRect(Math.min(a, b), MARGIN.top, Math.abs(b - a), this.plotHeight);
    }
    if (!isWithin) return;
    const x = this.x(cursor);
    context.strokeStyle = color("--muted");
    context.setLineDash([3, 3]);
    line(context, x, MARGIN.top, x, MARGIN.top + this.plotHeight);
    context.setLineDash([]);
    if (!this.spec.stacked) {
      for (const { line: series, value, smooth: smoothed } of values) {
        context.fillStyle = series.color;
        disc(context, x, this.y(this.view.smoothing > 0 ? smoothed : value), 3.5);
      }
    }
    if (!this.tip.hidden) this.placeTip(x, values, width);
  }

  isActive() {
    return this.top.matches(":hover") || this.top.matches(":focus");
  }

  placeTip(x, values, width) {
    const where = this.view.axis === "time" ? duration(this.view.cursor) : `step ${this.view.cursor}`;
    const rows = values.map(({ line: series, value }) => {
      const swatch = h("i", { class: "swatch" });
      swatch.style.setProperty("--swatch", series.color);
      swatch.classList.toggle("dashed", series.dash.length > 0);
      return h("div", null, swatch, h("span", null, series.label), h("b", null, number(value, 4)));
    });
    this.tip.replaceChildren(h("div", { class: "muted" }, where), ...rows);
    const left = x + 14 + this.tip.offsetWidth > width ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}

function size(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function disc(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}
