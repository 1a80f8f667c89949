// Arithmetic on series. A series has xs (ascending) and ys of the same length, with null for missing values.

/** Returns the exponential moving average, corrected for its start; ``weight`` in [0, 1) is the weight of the past. */
export function smooth(ys, weight) {
  if (!weight) return ys;
  let [sum, total] = [0, 0];
  return ys.map((y) => {
    if (y === null) return null;
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Stacks lines: sets each line's ``lower`` and ``upper`` edge; null counts as 0 if another line has a value. */
export function stack(lines) {
  let below = lines[0]?.xs.map((_, i) => (lines.some((line) => line.ys[i] !== null) ? 0 : null));
  for (const line of lines) {
    line.lower = below;
    line.upper = line.ys.map((y, i) => (line.lower[i] === null ? null : line.lower[i] + (y ?? 0)));
    below = line.upper;
  }
}

/** Returns the edges at a distance of ``around`` from ``ys``, with null where either is missing. */
export function spread(ys, around) {
  const edge = (sign) => ys.map((y, i) => (y === null || around[i] === null ? null : y + sign * around[i]));
  return { lower: edge(-1), upper: edge(1) };
}

/**
 * Returns the lowest and highest value of several arrays, widened by a share of their distance; null without values.
 * ``within`` ({xs, range}) excludes values whose x is outside the range.
 */
export function bounds(arrays, within, share) {
  let [low, high] = [Infinity, -Infinity];
  arrays.forEach((values, n) => {
    const xs = within?.xs[n];
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      if (value === null || value === undefined) continue;
      if (xs && (xs[i] < within.range[0] || xs[i] > within.range[1])) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  });
  if (low > high) return null;
  if (!share) return [low, high];
  // A constant series has a scale from 0.
  if (low === high) return low < 0 ? [1.2 * low, 0] : [0, 1.2 * high || 1];
  const room = (high - low) * share;
  return [low - room, high + room];
}

/**
 * Returns the points to draw. With more points than pixels, each pixel keeps its first, lowest, highest and last point, so
 * that no peak is lost. Includes one point beyond either end of the range. Gaps are joined.
 */
export function decimate(xs, ys, range, pixels) {
  let [start, end] = [firstAtOrAfter(xs, range[0]), firstAtOrAfter(xs, range[1])];
  start = Math.max(0, start - 1);
  end = Math.min(xs.length, end + 2);
  const points = [];
  if (end - start <= 2 * pixels) {
    for (let i = start; i < end; i++) if (ys[i] !== null && xs[i] !== null) points.push([xs[i], ys[i]]);
    return points;
  }
  const width = (range[1] - range[0]) / pixels;
  let bucket = null;
  const flush = () => bucket && points.push(...[...new Set(bucket.points)].sort((a, b) => a[0] - b[0]));
  for (let i = start; i < end; i++) {
    if (ys[i] === null || xs[i] === null) continue;
    const point = [xs[i], ys[i]];
    const place = Math.floor((xs[i] - range[0]) / width);
    if (bucket?.place !== place) {
      flush();
      bucket = { place, points: [point, point, point, point] };
    }
    if (point[1] < bucket.points[1][1]) bucket.points[1] = point;
    if (point[1] > bucket.points[2][1]) bucket.points[2] = point;
    bucket.points[3] = point;
  }
  flush();
  return points;
}

function firstAtOrAfter(xs, value) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Returns the element of an ascending array that is nearest to ``value``; null if the array is empty. */
export function nearest(sorted, value) {
  if (!sorted.length) return null;
  const at = firstAtOrAfter(sorted, value);
  if (at === 0) return sorted[0];
  if (at === sorted.length) return sorted[at - 1];
  return value - sorted[at - 1] < sorted[at] - value ? sorted[at - 1] : sorted[at];
}

/** Returns about ``count`` round numbers between low and high; with ``toEnds``, more of them if they leave a quarter free at an end. */
export function ticks(low, high, count, whole = false, toEnds = false) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const steps = [0.5, 1, 2, 5, 10].map((factor) => factor * power);
  const place = steps.findIndex((s) => s >= raw);
  const rest = (s) => Math.max(high - s * Math.floor(high / s), s * Math.ceil(low / s) - low);
  const step = Math.max(whole ? 1 : 0, steps[toEnds && rest(steps[place]) > (high - low) / 4 ? place - 1 : place]);
  const values = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) values.push(n * step);
  return values;
}
