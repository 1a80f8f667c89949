// The metrics of a run that were read so far, by column.

import { get } from "./api.js";

export class RunData {
  /** ``index`` is the run's place on the page, which decides its colour. */
  constructor(overview, index) {
    this.index = index;
    this.isShown = true;
    this.before = null;
    this.forget();
    this.take(overview);
  }

  /** Takes the server's overview of the run. */
  take(overview) {
    this.name = overview.name;
    this.path = overview.path;
    this.components = overview.components;
    this.settings = overview.components["ppo-trainer"]?.settings ?? {};
    this.summary = overview.summary;
    this.takeBefore(overview.summary);
  }

  /** Takes the accuracy before training, from a live run's state or a summary, as the row of step 0. */
  takeBefore({ accuracy_before: accuracy, accuracy_before_stderr: error }) {
    if (accuracy === null || accuracy === undefined) return;
    this.before = { step: 0, accuracy, ...(error === null || error === undefined ? {} : { accuracy_stderr: error }) };
    this.placeBefore();
  }

  placeBefore() {
    const isThere = this.column("step")?.[0] === 0;
    for (const name of Object.keys(this.before ?? {})) {
      if (!this.columns.has(name)) this.columns.set(name, new Array(this.length).fill(null));
    }
    for (const [name, column] of this.columns) {
      const value = this.before[name] ?? null;
      if (!isThere) column.unshift(value);
      else if (value !== null) column[0] = value;
    }
    if (!isThere) this.length += 1;
  }

  forget() {
    this.file = "";
    this.offset = 0;
    this.length = 0;
    this.unreadable = 0;
    this.columns = new Map();
    /** For each step, the number of completions by reward, as [[reward, count]]. */
    this.rewardCounts = new Map();
    if (this.before) this.placeBefore();
  }

  /** Reads the records appended since the last call; returns whether there were any. Calls ``progress`` between parts. */
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
      changed = this.append(reply.columns, reply.reward_counts) || changed;
      if (!reply.more) return changed;
      progress();
    }
  }

  append(columns, rewardCounts) {
    const steps = columns.step ?? [];
    for (const [i, step] of steps.entries()) if (rewardCounts[i]?.length) this.rewardCounts.set(step, rewardCounts[i]);
    for (const [name, values] of Object.entries(columns)) {
      let column = this.columns.get(name);
      if (!column) this.columns.set(name, (column = new Array(this.length).fill(null)));
      for (const value of values) column.push(value);
    }
    this.length += steps.length;
    for (const column of this.columns.values()) while (column.length < this.length) column.push(null);
    return steps.length > 0;
  }

  /** Returns a column, or null if the run does not have it. */
  column(name) {
    return this.columns.get(name) ?? null;
  }

  /** Returns the newest value of a column that is not null. */
  last(name) {
    const column = this.columns.get(name);
    if (!column) return null;
    for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
    return null;
  }

  /** Returns the mean of the newest ``count`` values of a column. */
  recent(name, count) {
    const values = (this.columns.get(name) ?? []).filter((value) => value !== null).slice(-count);
    return values.length ? values.reduce((a, b) => a + b) / values.length : null;
  }

  /** Returns each step's x: its number, or the seconds since the first step began. */
  xs(axis) {
    const steps = this.column("step") ?? [];
    if (axis === "step") return steps;
    const times = this.column("time") ?? [];
    const first = times.findIndex((time) => time !== null);
    const start = times[first] - (this.column("seconds_step")?.[first] ?? 0);
    return steps.map((step, i) => (step === 0 ? 0 : times[i] === null ? null : times[i] - start));
  }

  get status() {
    return this.summary.status ?? "running";
  }
}
