// Files made on this page for the browser to save, which needs neither the network nor a token.

import { h } from "./dom.js";

/** Saves ``parts`` (texts or blobs) as a file. */
export function save(name, parts, type) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  // Names of runs may be paths, and names of metrics may have any characters.
  h("a", { href: url, download: name.replace(/[^\w.@-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Saves rows as CSV, below a header of ``names``. */
export function saveCsv(name, names, rows) {
  save(name, [[names, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("")], "text/csv");
}

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  // Without a quote, a spreadsheet would run a model's text as a formula.
  const safe = /^[=+@\t\r-]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
