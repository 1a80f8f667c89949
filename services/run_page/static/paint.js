// Drawing on a canvas: a plane of values with axes, lines, bands, error bars and areas.

import { color } from "./colors.js";
import { number, tickLabels } from "./format.js";
import { decimate, ticks } from "./series.js";

const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };
const FONT = "11px system-ui, sans-serif";
const CAP = 4;
const GAP = 8;

/** The mapping of values to pixels on a canvas of ``width`` by ``height``: ``range`` of x, ``heights`` of y. */
export class Plane {
  constructor(width, height, range, heights) {
    Object.assign(this, { width, height, range, heights, ...MARGIN });
    this.plotWidth = width - MARGIN.left - MARGIN.right;
    this.plotHeight = height - MARGIN.top - MARGIN.bottom;
  }

  x(value) {
    const [first, last] = this.range;
    return this.left + ((value - first) / (last - first || 1)) * this.plotWidth;
  }

  y(value) {
    const [low, high] = this.heights;
    return this.top + (1 - (value - low) / (high - low || 1)) * this.plotHeight;
  }

  valueAt(pixel) {
    const [first, last] = this.range;
    return first + ((pixel - this.left) / this.plotWidth) * (last - first);
  }
}

/** Sets the size of a canvas, with ``scale`` device pixels for a pixel of the page. */
export function size(canvas, width, height, scale = window.devicePixelRatio || 1) {
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
}

/** Paints both axes. ``label`` formats x values; ``whole`` and ``wholeHeights`` restrict x and y ticks to whole numbers. */
export function paintAxes(context, plane, { name, label, whole = false, wholeHeights = false }) {
  context.font = FONT;
  context.lineWidth = 1;
  context.strokeStyle = color("--line");
  context.fillStyle = color("--muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const heights = ticks(...plane.heights, 5, wholeHeights, true);
  const labels = tickLabels(heights);
  for (const [i, value] of heights.entries()) {
    const y = Math.round(plane.y(value)) + 0.5;
    line(context, plane.left, y, plane.left + plane.plotWidth, y);
    context.fillText(labels[i], plane.left - 6, y);
  }
  context.textBaseline = "top";
  const below = plane.height - plane.bottom + 6;
  const xs = ticks(...plane.range, Math.max(2, Math.floor(plane.plotWidth / 50)), whole);
  const names = label ? xs.map(label) : tickLabels(xs);
  // The name ends before the first label, and begins at the edge at the latest.
  const free = xs.length ? plane.x(xs[0]) - context.measureText(names[0]).width / 2 - GAP : plane.left;
  context.fillText(name, Math.max(Math.min(plane.left - 12, free), context.measureText(name).width), below);
  for (const [i, value] of xs.entries()) {
    context.textAlign = plane.x(value) > plane.left + plane.plotWidth - 14 ? "right" : "center";
    context.fillText(names[i], Math.min(plane.x(value), plane.left + plane.plotWidth), below);
  }
}

/** Runs ``paint`` with its drawing clipped at the plot's edges; points on an edge stay whole. */
export function within(context, plane, paint) {
  context.save();
  context.beginPath();
  context.rect(plane.left - 6, plane.top - 6, plane.plotWidth + 12, plane.plotHeight + 12);
  context.clip();
  paint();
  context.restore();
}

/** Paints ``series`` ({xs, color, dash}) as a line through ``ys``, with discs for few points or with ``markers``. */
export function paintLine(context, plane, series, ys, { alpha = 1, width = 1.7, markers = false } = {}) {
  const points = decimate(series.xs, ys, plane.range, plane.plotWidth);
  context.globalAlpha = alpha;
  context.strokeStyle = context.fillStyle = series.color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(series.dash);
  context.beginPath();
  for (const [i, [x, y]] of points.entries()) context[i ? "lineTo" : "moveTo"](plane.x(x), plane.y(y));
  context.stroke();
  context.setLineDash([]);
  if (markers || points.length < 30) {
    const radius = points.length === 1 ? 5 : markers ? 3 : 2;
    for (const [x, y] of points) disc(context, plane.x(x), plane.y(y), radius);
  }
  context.globalAlpha = 1;
}

/** Paints the area between ``lower`` and ``upper``. */
export function paintArea(context, plane, series, lower, upper, alpha) {
  const edges = [upper, lower].map((ys) => decimate(series.xs, ys, plane.range, plane.plotWidth));
  context.beginPath();
  for (const [i, [x, y]] of edges[0].entries()) context[i ? "lineTo" : "moveTo"](plane.x(x), plane.y(y));
  for (const [x, y] of edges[1].reverse()) context.lineTo(plane.x(x), plane.y(y));
  context.closePath();
  context.fillStyle = series.color;
  context.globalAlpha = alpha;
  context.fill();
  context.globalAlpha = 1;
}

/** Paints an error bar from ``lower`` to ``upper`` at each point that has them. */
export function paintErrors(context, plane, series, lower, upper) {
  context.strokeStyle = series.color;
  context.lineWidth = 1;
  for (const [i, value] of series.xs.entries()) {
    if (value === null || lower[i] === null) continue;
    const [x, low, high] = [plane.x(value), plane.y(lower[i]), plane.y(upper[i])];
    line(context, x, low, x, high);
    for (const y of [low, high]) line(context, x - CAP, y, x + CAP, y);
  }
}

/** Paints columns for ``counts`` ([[value, count]]) with their counts above, ``shift`` pixels right of their values. */
export function paintColumns(context, plane, counts, { fill, width, shift }) {
  context.font = FONT;
  context.textAlign = "center";
  context.textBaseline = "bottom";
  for (const [value, amount] of counts) {
    const [left, top] = [plane.x(value) + shift - width / 2, plane.y(amount)];
    context.fillStyle = fill;
    context.fillRect(left, top, width, plane.y(0) - top);
    context.fillStyle = color("--muted");
    if (width > 14) context.fillText(number(amount, 4), left + width / 2, top - 1);
  }
}

export function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

export function disc(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}
