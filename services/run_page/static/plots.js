// The plots of the page: which metrics they show, and their common controls.

import { Chart, View } from "./chart.js";
import { seriesColor } from "./colors.js";
import { byId, h, show } from "./dom.js";
import { clock, duration, number } from "./format.js";
import { bounds } from "./series.js";

const perSecond = (tokens, seconds) => ({
  needs: [tokens, seconds],
  make: (a, b) => (a === null || !b ? null : a / b),
});

// A series names a metric, or a pattern of such, or makes its values of others. `compared` is what several runs show.
const PLOTS = [
  { id: "reward", title: "Reward", unit: "mean over completions", series: [["reward_mean", "reward"]] },
  {
    id: "accuracy",
    title: "Accuracy",
    unit: "on held-out prompts",
    markers: true,
    series: [["accuracy", "greedy pass@1"], [/^avg_at_\d+$/], [/^pass_at_\d+$/]],
  },
  { id: "loss", title: "Loss", series: [["loss", "fresh groups"], ["replay_loss", "replayed groups"]] },
  {
    id: "kl",
    title: "KL divergence",
    unit: "nats a token",
    series: [
      ["kl_behaviour", "to the behaviour policy"],
      ["kl_reference", "to the reference"],
      ["replay_kl_behaviour", "replayed, to the behaviour policy"],
    ],
  },
  {
    id: "entropy",
    title: "Entropy",
    unit: "nats a token",
    series: [["entropy", "fresh groups"], ["replay_entropy", "replayed groups"]],
  },
  { id: "lengths", title: "Completion length", unit: "tokens", series: [["length_mean", "mean"], ["length_max", "longest"]] },
  {
    id: "seconds",
    title: "Seconds by phase",
    unit: "of each step",
    stacked: true,
    series: [/wait/, /generate/, /reward/, /store/, /train/, /publish/, /evaluate/].map((p) => [
      new RegExp(`^seconds_(?!step)${p.source}$`),
    ]),
    compared: [["seconds_step", "step"]],
  },
  {
    id: "throughput",
    title: "Throughput",
    unit: "tokens a second",
    series: [
      [perSecond("completion_tokens", "seconds_generate"), "generated, while generating"],
      [perSecond("completion_tokens", "seconds_step"), "generated, over the whole step"],
      ["trained_tokens_per_second", "trained, while training"],
    ],
  },
  {
    id: "clipped",
    title: "Clipped tokens",
    unit: "share",
    series: [["clip_fraction_low", "below"], ["clip_fraction_high", "above"]],
  },
  { id: "ratio", title: "Probability ratio", unit: "extremes", series: [["ratio_max", "largest"], ["ratio_min", "smallest"]] },
  { id: "gradient", title: "Gradient norm", series: [["grad_norm", "fresh groups"], ["replay_grad_norm", "replayed groups"]] },
  { id: "staleness", title: "Staleness", unit: "policy versions", series: [["staleness_mean", "mean"], ["staleness_max", "largest"]] },
  { id: "truncation", title: "Truncated completions", unit: "share", series: [["truncation_rate", "truncated"]] },
  {
    id: "groups",
    title: "Groups",
    unit: "a step",
    series: [
      ["groups", "fresh"],
      ["zero_variance_groups", "all rewards equal"],
      ["replay_groups", "replayed"],
      ["groups_resampled", "replaced"],
      ["groups_dropped_stale", "dropped as stale"],
    ],
    compared: [["zero_variance_groups", "all rewards equal"]],
  },
  {
    id: "lost",
    title: "Left out",
    unit: "a step",
    series: [["unscorable", "completions not scorable"], ["updates_skipped", "updates not finite"]],
  },
  { id: "learning-rate", title: "Learning rate", series: [["learning_rate", "learning rate"]] },
  { id: "workers", title: "Rollout workers", unit: "up to date", series: [["workers", "workers"]] },
  {
    id: "memory",
    title: "Peak memory",
    unit: "GB, trainer rank 0",
    series: [[{ needs: ["peak_memory_bytes"], make: (bytes) => (bytes === null ? null : bytes / 1e9) }, "peak"]],
  },
];

const NOT_PLOTTED = new Set(["step", "time", "policy_version"]);
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [1, 2]];

export class Plots {
  /** ``choose`` is called with a step whose samples are wanted. */
  constructor(choose) {
    this.view = new View();
    this.choose = choose;
    this.runs = [];
    this.charts = new Map();
    this.grid = h("div", { class: "grid" });
    this.more = h("div", { class: "grid" });
    this.others = h("details", null, h("summary", null, "Further metrics"), this.more);
    this.where = h("span", { class: "muted", id: "cursor" });
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.view.set({ range: null }) }, "Whole run");
    this.empty = h("p", { class: "muted" }, "No step yet.");
    byId("plots").replaceChildren(h("div", { id: "summary" }), this.controls(), this.empty, this.grid, this.others);
    this.view.addEventListener("view", () => this.redraw());
    this.view.addEventListener("cursor", () => this.moveCursor());
    byId("plots").addEventListener("choose", () => this.view.cursor !== null && this.chooseCursor());
    this.others.addEventListener("toggle", () => this.redraw());
  }

  controls() {
    const change = (event) => this.view.set({ smoothing: Number(event.target.value) });
    const axis = (event) => {
      this.view.set({ axis: event.target.value, range: null, cursor: null });
      this.update(this.runs);
    };
    return h(
      "div",
      { class: "controls" },
      h("label", null, "Smoothing ", h("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: 0, oninput: change })),
      h("label", null, "Against ", h("select", { id: "axis", onchange: axis }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time"))),
      this.reset,
      this.where,
    );
  }

  /** Shows what is known of ``runs`` now. */
  update(runs) {
    this.runs = runs;
    const shown = runs.filter((run) => run.isShown && run.length);
    show(this.empty, !shown.length);
    const xs = new Map(shown.map((run) => [run, run.xs(this.view.axis)]));
    this.view.extent = bounds([...xs.values()], null, 0);
    const used = new Set(NOT_PLOTTED);
    for (const spec of PLOTS) this.place(spec, shown, xs, this.grid, used);
    const rest = new Set(shown.flatMap((run) => [...run.columns.keys()]).filter((name) => !used.has(name)));
    for (const name of [...rest].sort()) {
      this.place({ id: `metric-${name}`, title: name, series: [[name, name]] }, shown, xs, this.more, used);
    }
    show(this.others, rest.size > 0);
  }

  place(spec, runs, xs, parent, used) {
    const compares = runs.length > 1;
    for (const [source] of spec.series) for (const run of runs) for (const name of names(run, source)) used.add(name);
    if (compares && spec.compared) used.add(spec.compared[0][0]);
    if (spec.id === "seconds") used.add("seconds_step");
    const lines = runs.flatMap((run) => this.lines(spec, run, xs.get(run), compares));
    let chart = this.charts.get(spec.id);
    if (!lines.length) {
      if (chart) show(chart.element, false);
      return;
    }
    if (!chart) {
      chart = new Chart(spec, this.view);
      this.charts.set(spec.id, chart);
      parent.append(chart.element);
    }
    chart.spec = { ...spec, stacked: spec.stacked && !compares };
    show(chart.element, true);
    chart.update(lines);
  }

  lines(spec, run, xs, compares) {
    const lines = [];
    for (const [source, label] of (compares && spec.compared) || spec.series) {
      for (const { name, ys } of columns(run, source)) {
        if (!ys.some((y) => y !== null)) continue;
        const own = label ?? name.replace(/^seconds_/, "").replaceAll("_", " ").replace(" at ", "@");
        const place = lines.length;
        const look = compares
          ? { color: seriesColor(run.index), dash: DASHES[place % DASHES.length] }
          : { color: seriesColor(place), dash: [] };
        const entry = { key: own, label: own, ...look, color: compares ? "var(--muted)" : look.color };
        lines.push({ label: compares ? `${run.name}${place ? `, ${own}` : ""}` : own, xs, ys, entry, ...look });
      }
    }
    return lines;
  }

  redraw() {
    show(this.reset, this.view.range !== null);
    for (const chart of this.charts.values()) if (!chart.element.hidden) chart.draw();
  }

  moveCursor() {
    for (const chart of this.charts.values()) if (!chart.element.hidden) chart.drawCursor();
    const { cursor, axis } = this.view;
    const run = this.runs.find((candidate) => candidate.isShown && candidate.length);
    if (cursor === null || !run) return;
    const at = run.xs(axis).indexOf(cursor);
    const step = run.column("step")[at];
    const time = run.column("time")?.[at];
    if (step === undefined) return;
    this.step = step;
    const text = `step ${step}${time ? `, ${clock(time)}` : ""} `;
    const link = h("button", { type: "button", class: "link", onclick: () => this.choose(this.step) }, "its samples");
    this.where.replaceChildren(text, link);
  }

  chooseCursor() {
    if (this.step !== undefined) this.choose(this.step);
  }
}

function names(run, source) {
  if (typeof source === "string") return [source];
  if (source instanceof RegExp) return [...run.columns.keys()].filter((name) => source.test(name));
  return source.needs.length > 1 ? [] : source.needs;
}

function columns(run, source) {
  if (typeof source === "object" && source.make) {
    const inputs = source.needs.map((name) => run.column(name));
    if (inputs.some((input) => !input)) return [];
    return [{ name: source.needs[0], ys: inputs[0].map((_, i) => source.make(...inputs.map((input) => input[i]))) }];
  }
  return names(run, source).flatMap((name) => (run.column(name) ? [{ name, ys: run.column(name) }] : []));
}

/** The tiles above the plots of one run. */
export function summarise(run, now) {
  const rewards = run.column("reward_mean");
  const tiles = [
    ["Reward", change(mean(rewards?.filter((r) => r !== null).slice(0, 3)), run.recent("reward_mean", 3)), "first to newest 3 steps"],
    ["Accuracy", accuracy(run), "held-out prompts, greedy"],
    ["Step", duration(run.recent("seconds_step", 5)), "mean of the newest 5"],
    ["Generated", `${number(rate(run, "completion_tokens", "seconds_step"))}/s`, "tokens, over whole steps"],
    ["Policy version", number(now?.policy_version ?? run.last("policy_version"), 6), `staleness ${number(run.last("staleness_max"))}`],
    ["Length", number(run.recent("length_mean", 5)), `tokens, ${number(100 * (run.recent("truncation_rate", 5) ?? NaN))}% truncated`],
  ];
  return h(
    "dl",
    { class: "tiles" },
    tiles.map(([name, value, note]) =>
      h("div", { class: "card" }, h("dt", null, name), h("dd", null, value, " ", h("span", { class: "muted" }, note))),
    ),
  );
}

/** From a first value, where there is one, to the newest. */
function change(first, last) {
  return first === null || first === undefined ? number(last) : `${number(first)} → ${number(last)}`;
}

/** Accuracy before training, which is known when the run has ended, and the newest. */
function accuracy(run) {
  return change(run.summary.accuracy_before, run.last("accuracy"));
}

function mean(values) {
  return values?.length ? values.reduce((a, b) => a + b) / values.length : null;
}

function rate(run, tokens, seconds) {
  const [amount, time] = [run.recent(tokens, 5), run.recent(seconds, 5)];
  return amount === null || !time ? null : amount / time;
}

/** The table above the plots of several runs, with a box to show or hide each. */
export function compare(runs, changed) {
  const heads = ["", "run", "status", "steps", "reward", "accuracy", "training time", "model", "dataset"];
  const row = (run) => {
    const swatch = h("i", { class: "swatch" });
    swatch.style.setProperty("--swatch", `var(--series-${run.index % 8})`);
    const box = h("input", {
      type: "checkbox",
      "aria-label": `show ${run.name}`,
      checked: run.isShown,
      onchange: (event) => {
        run.isShown = event.target.checked;
        changed();
      },
    });
    const { summary } = run;
    const rewards = run.column("reward_mean")?.filter((r) => r !== null) ?? [];
    const cells = [
      h("span", null, box, swatch),
      run.name,
      run.status,
      number(run.last("step"), 6),
      `${number(mean(rewards.slice(0, 3)))} → ${number(mean(rewards.slice(-3)))}`,
      accuracy(run),
      duration(summary.seconds),
      run.settings.model_name ?? summary.model ?? "–",
      summary.dataset ?? "–",
    ];
    return h("tr", null, cells.map((cell) => h("td", null, cell)));
  };
  return h(
    "div",
    { class: "scroll", tabindex: "0" },
    h("table", null, h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", null, runs.map(row))),
  );
}
