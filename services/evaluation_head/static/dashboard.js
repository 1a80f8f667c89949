// The dashboard. It follows the head over a WebSocket and reconnects by itself.

import { forgetToken, hasToken, keepToken } from "./api.js";
import { Chart } from "./chart.js";
import { seriesColor } from "./colors.js";
import { byId, setText, show } from "./dom.js";
import { clock, number } from "./format.js";
import { Live } from "./live.js";
import { showDiscovered, showPolicies, showServers, showTiles } from "./tables.js";
import { View } from "./view.js";

const KEPT_SECONDS = 600;
const PLOTS = [
  { id: "rates", title: "Throughput", unit: "a second", lines: { "states_per_second": "states", "requests_per_second": "requests" } },
  { id: "batch", title: "Batch size", unit: "states a batch", lines: { "batch_size": "mean" } },
  { id: "latency", title: "Latency of /evaluate", unit: "ms", lines: { "latency_p50": "median", "latency_p95": "95 %" } },
  { id: "active", title: "Active episodes", unit: "", lines: { "active": "episodes" } },
  { id: "returns", title: "Returns", unit: "mean of the episodes that ended", lines: { "mean_return": "return" } },
];

const view = new View();
view.axis = "time";
const charts = PLOTS.map((plot) => new Chart(plot, view));
byId("plots").append(...charts.map((chart) => chart.element));
view.addEventListener("cursor", () => charts.forEach((chart) => chart.drawCursor()));
view.addEventListener("view", () => charts.forEach((chart) => chart.draw()));

let points = [];
let heard = Date.now() / 1000;

const live = new Live({
  onMessage({ stats, history }) {
    heard = Date.now() / 1000;
    // A restarted head begins its history anew; the points that this page has received stay.
    points = [...points, ...history.filter((point) => point.time > (points.at(-1)?.time ?? 0))];
    points = points.filter((point) => point.time > stats.time - KEPT_SECONDS);
    show(byId("token-form"), false);
    show(byId("trouble"), false);
    show(byId("all"), true);
    draw(stats);
  },
  onLost(reason) {
    setState("no connection", "bad");
    setText(byId("trouble"), `No word from the head since ${clock(heard)} (${reason}); connecting again.`);
    show(byId("trouble"), true);
  },
  onRefused() {
    askToken(true);
  },
});

function draw(stats) {
  const ill = stats.policies.filter((policy) => policy.trouble);
  setState(ill.length ? `${ill.map((policy) => policy.name).join(", ")}: trouble` : "live", ill.length ? "bad" : "live");
  setText(byId("about"), stats.policies.map(({ name, version }) => (version === null ? name : `${name} v${version}`)).join(" · "));
  const title = `${number(stats.states_per_second)} states/s · ${stats.episodes.active} episodes · evaluation head`;
  if (document.title !== title) document.title = title;
  showTiles(byId("tiles"), stats);
  showServers(byId("servers"), stats.servers);
  showDiscovered(byId("discovered"), byId("discovery"), stats.discovery);
  showPolicies(byId("policies"), stats.policies);
  drawPlots();
}

function drawPlots() {
  if (!points.length) return;
  const from = points[0].time;
  const xs = points.map((point) => point.time - from);
  view.extent = [0, Math.max(10, xs.at(-1))];
  PLOTS.forEach((plot, i) => {
    const lines = Object.entries(plot.lines).map(([key, label], n) => {
      const entry = { key, label, color: seriesColor(n), dash: [] };
      return { label, color: entry.color, dash: [], xs, ys: points.map((point) => point[key] ?? null), entry };
    });
    // Nothing makes requests of a head that plays by itself, for one.
    show(charts[i].element, lines.some(({ ys }) => ys.some((y) => y !== null)));
    charts[i].update(lines);
  });
}

function setState(word, kind) {
  setText(byId("state"), word);
  byId("state").className = `pill ${kind}`;
}

async function discover() {
  const button = byId("discover");
  button.disabled = true;
  setText(byId("discovery"), "looking …");
  try {
    const reply = await live.post("discover");
    showDiscovered(byId("discovered"), byId("discovery"), reply);
  } catch (error) {
    setText(byId("discovery"), `could not look: ${error.message}`);
  } finally {
    button.disabled = false;
  }
}

function askToken(wasRefused) {
  forgetToken();
  show(byId("all"), false);
  show(byId("trouble"), false);
  show(byId("token-form"), true);
  show(byId("token-refused"), wasRefused);
  setState("token needed", "fair");
  byId("token").focus();
}

const theme = () => document.documentElement.dataset.theme ?? "auto";

function chooseTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  setText(byId("theme"), `${name} theme`);
  drawPlots();
}

chooseTheme(localStorage.getItem("theme") ?? "auto");
byId("theme").addEventListener("click", () => chooseTheme({ auto: "dark", dark: "light", light: "auto" }[theme()]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawPlots);
byId("discover").addEventListener("click", discover);
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(byId("token").value);
  byId("token").value = "";
  live.connect();
});
if (document.documentElement.dataset.asksToken === "true" && !hasToken()) askToken(false);
else live.connect();
