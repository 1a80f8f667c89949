// Numbers and times as people read them.

/** A number with about ``digits`` significant digits: 0.0312, 12.4, 1,234, 1.2M, 3.1e-7. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${trim((value / 1e9).toPrecision(digits))}G`;
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(digits))}M`;
  if (size >= 1e5) return `${trim((value / 1e3).toPrecision(digits))}k`;
  if (size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return trim(value.toPrecision(digits));
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** Seconds as 4.2s, 45s, 3m05s, 2h07m or 3d04h. */
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

/** A time of seconds since 1970 as this browser's clock shows it. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
