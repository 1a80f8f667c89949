// The colours of the style sheet, for canvases, which cannot use its variables.

import { h } from "./dom.js";

const SERIES = 13;
const probe = h("i", { hidden: true });
document.body.append(probe);

/** Returns the value of a CSS colour in the current theme. */
export function valueOf(css) {
  probe.style.color = css;
  return getComputedStyle(probe).color;
}

/** Returns the value of a colour variable in the current theme. */
export const color = (variable) => valueOf(`var(${variable})`);

/** Returns the colour of the n-th series of a plot. */
export const seriesColor = (n) => color(`--series-${n % SERIES}`);

/** Returns the CSS colour of the run in a slot: the series' colours, then twice the same ones closer to the text's. */
export function runColor(slot) {
  const share = 30 * (Math.floor(slot / SERIES) % 3);
  return `color-mix(in oklab, var(--series-${slot % SERIES}), var(--text) ${share}%)`;
}
