// The metrics of a run that were read so far, by column.

import { RefusedError, get } from "./api.js";
import { count } from "./format.js";

/** The states of a run that is, or may be, under way; services/run_page/directory.py has all. */
const GOING = ["running", "may be under way"];

export class RunData {
  constructor(overview) {
    this.before = null;
    /** The place of the run among those with curves, which decides its colour; null without curves. */
    this.slot = null;
    this.isShown = false;
    /** Why the server refused the metrics. */
    this.refusal = null;
    this.forget();
    this.take(overview);
  }

  /** Takes the server's overview of the run. */
  take(overview) {
    this.name = overview.name;
    this.path = overview.path;
    this.written = overview.written;
    this.damaged = overview.damaged;
    this.firstFailure = overview.first_failure;
    /** The run that this one was forked from: {parent, at, changes}; empty without one. */
    this.fork = overview.fork ?? {};
    this.components = overview.components;
    this.settings = overview.components["ppo-trainer"]?.settings ?? {};
    this.summary = overview.summary;
    this.state = overview.state;
    this.error = overview.error;
    /** What is wrong with the run, the most severe first, as services/run_page/rules.py says it. */
    this.findings = overview.findings ?? [];
    this.takeBefore(overview.summary);
    this.placeAfter();
  }

  /** Takes the accuracy before training, from a live run's state or a summary, as the row of step 0. */
  takeBefore({ accuracy_before: accuracy, accuracy_before_low: low, accuracy_before_high: high, eval_reward_before: reward }) {
    if (accuracy === null || accuracy === undefined) return;
    const ends = [low, high].some((end) => end === null || end === undefined) ? {} : { accuracy_low: low, accuracy_high: high };
    this.before = { step: 0, accuracy, ...ends, ...(reward === null || reward === undefined ? {} : { eval_reward: reward }) };
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

  /** Places the newest accuracy, which a summary has, in the row of its step: no line has that of an evaluation after the steps. */
  placeAfter() {
    const { accuracy_after: accuracy = null, accuracy_after_low: low = null, accuracy_after_high: high = null } = this.summary;
    const row = this.column("step")?.indexOf(this.summary.accuracy_after_step) ?? -1;
    if (accuracy === null || row === -1) return;
    for (const [name, value] of Object.entries({ accuracy, accuracy_low: low, accuracy_high: high })) {
      if (!this.columns.has(name)) this.columns.set(name, new Array(this.length).fill(null));
      this.columns.get(name)[row] = value;
    }
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

  /**
   * Reads the records appended since the last call; returns whether there were any. Calls ``progress`` after each part. A
   * refusal, for a file that cannot be read or is gone, is kept as ``refusal``.
   */
  async read(progress) {
    try {
      return await this.readRest(progress);
    } catch (error) {
      if (!(error instanceof RefusedError)) throw error;
      this.refusal = `metrics.jsonl: ${error.message}`;
      return false;
    }
  }

  async readRest(progress) {
    let changed = false;
    const upTo = this.written;
    for (;;) {
      const reply = await get("api/metrics", { run: this.name, file: this.file, offset: this.offset });
      this.refusal = null;
      if (reply.restarted) {
        this.forget();
        changed = true;
      }
      this.file = reply.file;
      this.offset = reply.offset;
      this.unreadable += reply.unreadable;
      changed = this.append(reply.columns, reply.reward_counts) || changed;
      if (!reply.more) this.readTo = upTo;
      if (changed) progress();
      if (!reply.more) return changed;
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
    this.placeAfter();
    return steps.length > 0;
  }

  get isOver() {
    return !GOING.includes(this.state);
  }

  /** Returns whether the run may have metrics that were not read. */
  get isBehind() {
    return !this.isOver || this.readTo !== this.written;
  }

  /** Returns sentences on the run's files that could not be read, and on the first answer that failed. */
  get damage() {
    const lines = this.unreadable ? [`metrics.jsonl has ${count(this.unreadable)} broken ${this.unreadable === 1 ? "line" : "lines"}`] : [];
    const failure = this.firstFailure && `The first answer that failed: ${this.firstFailure}`;
    return [failure, ...this.damaged, this.refusal, ...lines].filter(Boolean);
  }

  /** Returns the run of ``runs`` that this one was forked from, if it is among them. */
  parentIn(runs) {
    const { parent } = this.fork;
    return parent && runs.find(({ name }) => name === parent || name.endsWith(`/${parent}`));
  }

  /** Returns the way to this run from the first one of its family, with what was changed at each fork; "" for a run that is no fork. */
  familyIn(runs) {
    const { parent, at, changes } = this.fork;
    if (!parent) return "";
    const before = this.parentIn(runs)?.familyIn(runs) || parent;
    return `${before} → ${this.name} (from step ${at}: ${changes.join(", ") || "no change"})`;
  }

  /** Sets the columns of rewards and accuracies less those of the run that this one was forked from, step by step. */
  pairWith(parent) {
    const [steps, theirSteps] = [this.column("step"), parent.column("step")];
    for (const name of ["reward_mean", "accuracy"]) {
      const [mine, theirs] = [this.column(name), parent.column(name)];
      if (!mine || !theirs) continue;
      const byStep = new Map(theirSteps.map((step, i) => [step, theirs[i]]));
      const differences = mine.map((value, i) => (value === null || (byStep.get(steps[i]) ?? null) === null ? null : value - byStep.get(steps[i])));
      this.columns.set(`paired_${name}`, differences);
    }
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

  /** Returns the lowest and highest reward of any completion; null without counts of rewards. */
  get rewardRange() {
    const rewards = [...this.rewardCounts.values()].flatMap((counts) => counts.map(([reward]) => reward));
    return rewards.length ? [Math.min(...rewards), Math.max(...rewards)] : null;
  }

  /** Returns the mean of the newest ``count`` values of a column. */
  recent(name, count) {
    const values = (this.columns.get(name) ?? []).filter((value) => value !== null).slice(-count);
    return values.length ? mean(values) : null;
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

  get steps() {
    return (this.file && this.last("step")) || (this.summary.steps ?? null);
  }

  /** Returns the number of first and of newest steps over which rewards are averaged, as services/run_page/progress.py does. */
  get rewardSteps() {
    const rewards = (this.column("reward_mean") ?? []).filter((reward) => reward !== null);
    return Math.max(1, Math.min(3, Math.floor(rewards.length / 2)));
  }

  /** Returns the mean rewards of the first and the newest steps. */
  get rewards() {
    const rewards = (this.column("reward_mean") ?? []).filter((reward) => reward !== null);
    if (!rewards.length) return [this.summary.reward_first ?? null, this.summary.reward_last ?? null];
    const steps = this.rewardSteps;
    return [mean(rewards.slice(0, steps)), rewards.length > 1 ? mean(rewards.slice(-steps)) : null];
  }

  /** Returns the number of completions without a reward; an agent's include those of prompts that were left out. */
  get failed() {
    const sum = (name) => this.column(name)?.reduce((a, b) => a + (b ?? 0), 0);
    const episodes = sum("episodes_failed"); // of which those over a limit have one
    return episodes === undefined ? sum("unscorable") ?? 0 : Math.max(episodes - (sum("over_limit") ?? 0), 0);
  }

  /** Returns the accuracy before training and the newest, which the summary of a run that has ended knows. */
  get accuracies() {
    const later = this.column("accuracy")?.some((value, row) => value !== null && this.column("step")[row] > 0);
    return [this.before?.accuracy ?? null, this.summary.accuracy_after ?? (later ? this.last("accuracy") : null)];
  }

  /** Returns the ends of the newest accuracy's 95% interval, and the prompts that it is over; null for what is not known. */
  get accuracyInterval() {
    const [low, high] = ["low", "high"].map((end) => this.summary[`accuracy_after_${end}`] ?? (this.file ? this.last(`accuracy_${end}`) : null));
    const asked = this.file ? this.last("eval_prompts") : null;
    const prompts = this.summary.accuracy_after_prompts ?? (asked === null ? null : asked - (this.last("eval_left_out") ?? 0));
    return { low, high, prompts };
  }
}

const mean = (values) => values.reduce((a, b) => a + b) / values.length;
