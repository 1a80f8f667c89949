// The parts around a plot: its caption, the swatches of its legend, the button that saves it.

import { h } from "./dom.js";

/** Returns the caption of a plot: its title, and an element with its unit. */
export function caption(title, unit) {
  return h("figcaption", null, h("strong", null, title), " ", unit);
}

/** Returns a button that saves the plot as a picture. It comes last, so that the Tab key reaches the plot first. */
export function saveButton(title, onclick) {
  const label = `Save ${title} as a picture`;
  return h("button", { type: "button", class: "save", "aria-label": label, title: label, onclick }, "PNG");
}

/** Returns a line in the colour and dashes of a series. */
export function swatch({ color: shown, dash }) {
  const element = h("i", { class: dash.length ? "swatch dashed" : "swatch" });
  element.style.setProperty("--swatch", shown);
  return element;
}
