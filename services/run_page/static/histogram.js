// The distribution of one step's rewards: the number of completions by reward.

import { caption, saveButton } from "./caption.js";
import { HEIGHT } from "./chart.js";
import { h, show } from "./dom.js";
import { count, number } from "./format.js";
import { Plane, paintAxes, paintColumns, size, within } from "./paint.js";
import { savePicture } from "./picture.js";
import { bounds } from "./series.js";

const [WIDEST, NARROWEST] = [40, 2];
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

  /** Shows ``step`` of ``runs``; without it the chosen step, or else the newest. */
  update(runs, step) {
    const newest = Math.max(...runs.map((run) => [...run.rewardCounts.keys()].at(-1) ?? 0));
    const shown = step || Number(this.chosen.value) || newest;
    this.runs = runs.map((run) => ({ name: run.name, color: run.color, counts: run.rewardCounts.get(shown) ?? [] }));
    this.step = shown;
    show(this.element, runs.some((run) => run.rewardCounts.size > 0));
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    size(this.canvas, width, HEIGHT);
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, HEIGHT);
    this.paint(context, width, HEIGHT);
    const words = this.runs.map(({ name, counts }) => {
      const amounts = counts.map(([reward, amount]) => `${count(amount)} with reward ${number(reward)}`);
      return `${this.runs.length > 1 ? `${name}: ` : ""}${amounts.join(", ") || "none"}`;
    });
    this.canvas.setAttribute("aria-label", `${TITLE}, number of completions. Step ${count(this.step)}: ${words.join("; ")}.`);
    const total = this.runs.flatMap((run) => run.counts).reduce((sum, [, amount]) => sum + amount, 0);
    this.what.textContent = total ? `shown: step ${count(this.step)}, ${count(total)} completions` : `no rewards of step ${count(this.step)}`;
  }

  paint(context, width, height) {
    const rewards = [...new Set(this.runs.flatMap((run) => run.counts.map(([reward]) => reward)))].sort((a, b) => a - b);
    const amounts = this.runs.flatMap((run) => run.counts.map(([, amount]) => amount));
    const [low, high] = bounds([rewards], null, 0) ?? [0, 1];
    const room = 0.12 * (high - low) || 0.5;
    // Room for the numbers above the columns.
    const plane = new Plane(width, height, [low - room, high + room], [0, 1.15 * Math.max(1, ...amounts)]);
    paintAxes(context, plane, { name: "reward", wholeHeights: true });
    const gap = Math.min(...rewards.slice(1).map((reward, i) => plane.x(reward) - plane.x(rewards[i])), plane.plotWidth);
    const column = Math.max(NARROWEST, Math.min(WIDEST, (0.85 * gap) / this.runs.length));
    within(context, plane, () => {
      for (const [place, { color, counts }] of this.runs.entries()) {
        const shift = (place - (this.runs.length - 1) / 2) * column;
        paintColumns(context, plane, counts, { fill: color, width: column, shift });
      }
    });
  }

  save() {
    savePicture(`rewards-of-step-${this.step}`, {
      title: `Rewards of step ${count(this.step)}`,
      unit: `number of completions by reward${this.runs.length === 1 ? ` · ${this.runs[0].name}` : ""}`,
      entries: this.runs.map(({ name, color }) => ({ label: name, color, dash: [] })),
      paint: (context, width, height) => this.paint(context, width, height),
    });
  }
}
