// The distribution of one step's rewards: the number of completions by reward.

import { caption, saveButton } from "./caption.js";
import { HEIGHT } from "./chart.js";
import { h, show } from "./dom.js";
import { count, number } from "./format.js";
import { Plane, paintAxes, paintColumns, size, within } from "./paint.js";
import { savePicture } from "./picture.js";
import { bounds } from "./series.js";

const [WIDEST, NARROWEST] = [40, 2];
/** The share of the way between neighbouring rewards that columns may fill. */
const FILLED = 0.85;
const TITLE = "Rewards of one step";

export class Histogram {
  /** Calls ``changed`` when the user chose another step. */
  constructor(changed) {
    this.runs = [];
    this.canvas = h("canvas", { tabindex: "0", role: "img" });
    this.frame = h("div", { class: "frame" }, this.canvas);
    this.chosen = h("input", { type: "number", min: 1, class: "short", placeholder: "newest", oninput: changed });
    this.what = h("span");
    this.element = h(
      "figure",
      { id: "plot-histogram", class: "card", hidden: true },
      caption(TITLE, h("span", { class: "muted" }, "number of completions by reward")),
      h("div", { class: "muted choice" }, h("label", null, "Step ", this.chosen), " ", this.what),
      this.frame,
      saveButton(TITLE, () => this.save()),
    );
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  /** Shows ``step`` of ``runs``; without it the chosen step, or else each run's newest. */
  update(runs, step) {
    const chosen = step || Number(this.chosen.value);
    const counted = runs.filter((run) => run.rewardCounts.size > 0);
    this.runs = counted.map((run) => {
      const shown = chosen || [...run.rewardCounts.keys()].at(-1);
      return { name: run.name, color: run.color, step: shown, counts: run.rewardCounts.get(shown) ?? [] };
    });
    const steps = [...new Set(this.runs.map((run) => run.step))].sort((a, b) => a - b);
    this.step = steps.length > 1 ? null : (steps[0] ?? 0);
    this.steps = steps.length > 1 ? "the newest step of each run" : `step ${count(this.step)}`;
    show(this.element, counted.length > 0);
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    size(this.canvas, width, HEIGHT);
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, HEIGHT);
    this.paint(context, width, HEIGHT);
    const words = this.runs.map(({ name, step, counts }) => {
      const amounts = counts.map(([reward, amount]) => `${count(amount)} with reward ${number(reward)}`);
      const whose = this.runs.length > 1 ? `${name}${this.step === null ? `, step ${count(step)}` : ""}: ` : "";
      return `${whose}${amounts.join(", ") || "none"}`;
    });
    this.canvas.setAttribute("aria-label", `${TITLE}, number of completions. ${this.steps[0].toUpperCase()}${this.steps.slice(1)}: ${words.join("; ")}.`);
    const total = this.runs.flatMap((run) => run.counts).reduce((sum, [, amount]) => sum + amount, 0);
    this.what.textContent = total ? `shown: ${this.steps}, ${count(total)} completions` : `no rewards of ${this.steps}`;
  }

  paint(context, width, height) {
    // A run without such a step takes no space.
    const runs = this.runs.filter((run) => run.counts.length);
    const rewards = [...new Set(runs.flatMap((run) => run.counts.map(([reward]) => reward)))].sort((a, b) => a - b);
    const amounts = runs.flatMap((run) => run.counts.map(([, amount]) => amount));
    const [lowest, highest] = bounds([rewards], null, 0) ?? [0, 1];
    // Around a single reward, most rewards lie between 0 and 1.
    const [low, high] = lowest < highest ? [lowest, highest] : [Math.min(0, lowest), Math.max(1, highest)];
    const nearest = Math.min(...rewards.slice(1).map((reward, i) => reward - rewards[i]), high - low);
    // On either side, several runs' columns take up to half of their share of the way to the next reward.
    const room = Math.max(0.12 * (high - low), runs.length > 1 ? (FILLED / 2 + 0.02) * nearest : 0) || 0.5;
    // Room for the numbers above the columns.
    const plane = new Plane(width, height, [low - room, high + room], [0, 1.15 * Math.max(1, ...amounts)]);
    paintAxes(context, plane, { name: "reward", wholeHeights: true });
    const gap = nearest ? plane.x(low + nearest) - plane.x(low) : plane.plotWidth;
    const column = Math.max(NARROWEST, Math.min(WIDEST, (FILLED * gap) / runs.length));
    within(context, plane, () => {
      for (const [place, { color, counts }] of runs.entries()) {
        const shift = (place - (runs.length - 1) / 2) * column;
        paintColumns(context, plane, counts, { fill: color, width: column, shift });
      }
    });
  }

  save() {
    savePicture(`rewards-of-${this.steps.replaceAll(" ", "-")}`, {
      title: `Rewards of ${this.steps}`,
      unit: `number of completions by reward${this.runs.length === 1 ? ` · ${this.runs[0].name}` : ""}`,
      entries: this.runs.map(({ name, color }) => ({ label: name, color, dash: [] })),
      paint: (context, width, height) => this.paint(context, width, height),
    });
  }
}
