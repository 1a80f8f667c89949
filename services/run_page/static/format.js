// Numbers and times in a form for people.

const UNITS = [
  [1e9, 1e9, "G"],
  [1e6, 1e6, "M"],
  [1e5, 1e3, "k"],
];

/** Returns a number with about ``digits`` significant digits: 0.0312, 12.4, 1,234, 1.2M, 3.1e-7. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const rounded = Number(value.toPrecision(digits));
  const size = Math.abs(rounded);
  if (size === 0) return "0";
  for (const [from, unit, name] of UNITS) {
    if (size >= from) return `${trim((rounded / unit).toPrecision(digits))}${name}`;
  }
  if (size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e");
  if (size >= 1000) return count(value);
  return trim(value.toPrecision(digits));
}

/** Returns a whole number with all its digits: 1,234,567. */
export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

/** Returns a number of things: 1 prompt, 12 prompts. */
export function some(value, thing) {
  return `${count(value)} ${thing}${value === 1 ? "" : "s"}`;
}

/** Returns the labels of an axis: all with as many decimals as neighbouring values need to differ. */
export function tickLabels(values) {
  if (values.length < 2) return values.map((value) => number(value));
  const place = (value) => Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  const top = Math.max(...values.map(Math.abs));
  const last = place(values[1] - values[0]);
  return values.map((value) => {
    // Rounding may turn 0 into 1e-17.
    if (Math.abs(value) < 1e-9 * top) return "0";
    if (top >= 1e5) return number(value, Math.max(1, place(value) - last + 1));
    if (top < 1e-3) return value.toExponential(Math.max(0, place(value) - last));
    const decimals = Math.min(12, Math.max(0, -last));
    return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  });
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** Returns seconds as 4.2s, 45s, 3m05s, 2h07m or 3d04h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)}s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
}

function two(value) {
  return String(value).padStart(2, "0");
}

/** Returns seconds since 1970 as a date and a time of day in the browser's time zone: 2026-01-31 12:00. */
export function date(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const time = new Date(seconds * 1000);
  const day = [time.getFullYear(), time.getMonth() + 1, time.getDate()].map(two).join("-");
  return `${day} ${two(time.getHours())}:${two(time.getMinutes())}`;
}

/** Returns seconds since 1970 as a time of day in the browser's time zone. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
