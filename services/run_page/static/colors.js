// The colours of the style sheet, for canvases, which cannot use its variables.

import { h } from "./dom.js";

const probe = h("i", { hidden: true });
document.body.append(probe);

/** Returns the value of a colour variable in the current theme. */
export function color(variable) {
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

/** Returns the colour of the n-th series of a plot, or of the n-th run. */
export const seriesColor = (n) => color(`--series-${n % 8}`);
