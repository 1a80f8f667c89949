// Plots as PNG files, with title, unit and legend.

import { color } from "./colors.js";
import { save } from "./download.js";
import { h } from "./dom.js";
import { size } from "./paint.js";

const [WIDTH, HEIGHT, PADDING, ROW, SCALE] = [720, 320, 16, 18, 2];

/**
 * Saves what ``paint(context, width, height)`` draws below ``title`` and ``unit``, with a legend of ``entries``
 * ([{label, color, dash}]), as ``name``.png.
 */
export function savePicture(name, { title, unit, entries, paint }) {
  const canvas = h("canvas");
  const context = canvas.getContext("2d");
  const rows = entries.length > 1 ? layOut(context, entries) : [];
  const above = PADDING + 2 * ROW + rows.length * ROW + 6;
  const height = above + HEIGHT + PADDING / 2;
  size(canvas, WIDTH, height, SCALE);
  context.fillStyle = color("--card");
  context.fillRect(0, 0, WIDTH, height);
  context.textBaseline = "middle";
  write(context, "600 15px system-ui, sans-serif", "--text", title, PADDING, PADDING + ROW / 2);
  write(context, "12px system-ui, sans-serif", "--muted", unit, PADDING, PADDING + 1.5 * ROW);
  for (const [i, row] of rows.entries()) {
    const y = PADDING + (2.5 + i) * ROW;
    for (const { entry, x } of row) {
      context.strokeStyle = entry.color;
      context.lineWidth = 2.5;
      context.setLineDash(entry.dash);
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + 18, y);
      context.stroke();
      context.setLineDash([]);
      write(context, "12px system-ui, sans-serif", "--muted", entry.label, x + 24, y);
    }
  }
  context.translate(PADDING / 2, above);
  paint(context, WIDTH - PADDING, HEIGHT);
  canvas.toBlob((blob) => save(`${name}.png`, [blob], "image/png"));
}

function write(context, font, variable, text, x, y) {
  context.font = font;
  context.textAlign = "left";
  context.fillStyle = color(variable);
  context.fillText(text, x, y);
}

/** Returns the entries of a legend in rows that fit the width. */
function layOut(context, entries) {
  context.font = "12px system-ui, sans-serif";
  const rows = [[]];
  let x = PADDING;
  for (const entry of entries) {
    const width = 24 + context.measureText(entry.label).width + 18;
    if (x + width > WIDTH - PADDING && x > PADDING) {
      rows.push([]);
      x = PADDING;
    }
    rows.at(-1).push({ entry, x });
    x += width;
  }
  return rows;
}
