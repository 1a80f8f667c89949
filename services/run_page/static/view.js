// The state that all plots share.

import { count, duration } from "./format.js";

/** The x axis, its range, smoothing, the cursor's position, and the run that stands out. */
export class View extends EventTarget {
  axis = "step";
  smoothing = 0;
  range = null;
  /** The range of x of all data. */
  extent = null;
  cursor = null;
  /** The run whose lines stand out. */
  emphasis = null;

  set(change) {
    Object.assign(this, change);
    const [name, ...others] = Object.keys(change);
    this.dispatchEvent(new Event(["cursor", "emphasis"].includes(name) && !others.length ? name : "view"));
  }

  /** Returns a position on the x axis in words. */
  place(x) {
    return this.axis === "time" ? duration(x) : `step ${count(x)}`;
  }
}
