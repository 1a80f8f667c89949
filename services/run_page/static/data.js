// The metrics of a run, by column, as far as they have been read.

import { get } from "./api.js";

export class RunData {
  /** ``index`` is the run's place on the page, which gives it its colour. */
  constructor(overview, index) {
    this.index = index;
    this.isShown = true;
    this.take(overview);
    this.forget();
  }

  /** Takes in what the server says of the run as a whole. */
  take(overview) {
    this.name = overview.name;
    this.path = overview.path;
    this.settings = overview.settings;
    this.components = overview.components;
    this.summary = overview.summary;
  }

  forget() {
    this.file = "";
    this.offset = 0;
    this.length = 0;
    this.unreadable = 0;
    this.columns = new Map();
  }

  /** Reads what was appended since the last call; true when there was something. Calls ``progress`` between parts. */
  async read(progress) {
    let changed = false;
    for (;;) {
      const reply = await get("api/metrics", { run: this.name, file: this.file, offset: this.offset });
      if (reply.restarted) {
        this.forget();
        changed = true;
      }
      this.file = reply.file;
      this.offset = reply.offset;
      this.unreadable += reply.unreadable;
      changed = this.append(reply.columns) || changed;
      if (!reply.more) return changed;
      progress();
    }
  }

  append(columns) {
    const steps = columns.step ?? [];
    for (const [name, values] of Object.entries(columns)) {
      let column = this.columns.get(name);
      if (!column) this.columns.set(name, (column = new Array(this.length).fill(null)));
      for (const value of values) column.push(value);
    }
    this.length += steps.length;
    for (const column of this.columns.values()) while (column.length < this.length) column.push(null);
    return steps.length > 0;
  }

  /** A column, or null where the run has none. */
  column(name) {
    return this.columns.get(name) ?? null;
  }

  /** The newest value of a column that is not null. */
  last(name) {
    const column = this.columns.get(name);
    if (!column) return null;
    for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
    return null;
  }

  /** The mean of the newest ``count`` values of a column. */
  recent(name, count) {
    const values = (this.columns.get(name) ?? []).filter((value) => value !== null).slice(-count);
    return values.length ? values.reduce((a, b) => a + b) / values.length : null;
  }

  /** Where each step stands on the x axis: its number, or the seconds since the first. */
  xs(axis) {
    const steps = this.column("step") ?? [];
    if (axis === "step") return steps;
    const times = this.column("time") ?? [];
    return times.map((time) => (time === null ? null : time - times[0]));
  }

  get status() {
    return this.summary.status ?? "running";
  }
}
