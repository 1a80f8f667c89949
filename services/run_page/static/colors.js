// The colours of the style sheet, for canvases, which know nothing of its variables.

import { h } from "./dom.js";

const probe = h("i", { hidden: true });
document.body.append(probe);

/** The value that a colour variable has in the theme of the moment. */
export function color(variable) {
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

/** The colour of the n-th series of a plot, or of the n-th run. */
export const seriesColor = (n) => color(`--series-${n % 8}`);
