// The page as a whole: reads new data every few seconds while the page is visible, and shows the chosen tab.

import { TokenError, UnreachableError, forgetToken, get, hasToken, keepToken } from "./api.js";
import { Comparison } from "./comparison.js";
import { look, showComponents, stateOf } from "./components.js";
import { RunData } from "./data.js";
import { byId, h, setText, show } from "./dom.js";
import { clock, count, duration, number } from "./format.js";
import { Plots } from "./plots.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { summarise } from "./summary.js";

const POLL_MILLISECONDS = 2000;
const OVERVIEW_EVERY = 5;
const TABS = { plots: "Plots", samples: "Samples", components: "Components", settings: "Settings" };

const page = {
  isLive: false,
  runs: [],
  now: null,
  tab: "plots",
  turns: 0,
  answered: Date.now() / 1000,
  plots: new Plots((step) => {
    location.hash = "samples";
    page.samples.choose(step);
  }),
  samples: new Samples((error) => fail(error)),
  settings: new Settings(),
  comparison: new Comparison(
    () => {
      page.plots.update(page.runs);
      poll();
    },
    (run) => page.plots.view.set({ emphasis: run?.name ?? null }),
  ),
};

async function start() {
  chooseTheme(localStorage.getItem("theme") ?? "auto");
  byId("theme").addEventListener("click", () => chooseTheme({ auto: "dark", dark: "light", light: "auto" }[theme()]));
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepToken(byId("token").value);
    byId("token").value = "";
    poll();
  });
  window.addEventListener("hashchange", showTab);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.plots.update(page.runs));
  document.addEventListener("visibilitychange", () => document.hidden || poll());
  if (document.documentElement.dataset.asksToken === "true" && !hasToken()) askToken(false);
  else poll();
}

const theme = () => document.documentElement.dataset.theme ?? "auto";

function chooseTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  setText(byId("theme"), `${name} theme`);
  page.plots.update(page.runs);
}

function askToken(wasRefused) {
  forgetToken();
  show(byId("token-form"), true);
  show(byId("token-refused"), wasRefused);
  show(byId("tabs"), false);
  for (const name of Object.keys(TABS)) show(byId(name), false);
  byId("token").focus();
}

let timer;
let isPolling = false;
let isDue = false;

/** Reads new data, shows it, and schedules the next call. */
async function poll() {
  isDue = true;
  if (isPolling) return;
  [isPolling, isDue] = [true, false];
  clearTimeout(timer);
  try {
    if (page.turns++ % OVERVIEW_EVERY === 0) await readOverview();
    page.now = page.isLive ? await get("api/now") : null;
    if (page.now) {
      page.now.components.forEach((component) => (component.state = stateOf(component, page.now)));
      page.runs[0].takeBefore(page.now);
    }
    draw();
    // The table has the outcome of a run that ended; its metrics are read for its curves only.
    const isWanted = (run) => page.isLive || (run.isBehind && (run.slot !== null || !run.summary.status || !run.isOver));
    const changes = await Promise.all(page.runs.filter(isWanted).map((run) => run.read(drawSoon)));
    page.answered = Date.now() / 1000;
    show(byId("trouble"), false);
    draw();
    if (page.tab === "samples" && changes.some(Boolean)) page.samples.refresh();
    plan();
  } catch (error) {
    fail(error);
  } finally {
    isPolling = false;
  }
}

async function readOverview() {
  const reply = await get("api/runs");
  page.isLive = reply.live;
  const byName = new Map(page.runs.map((run) => [run.name, run]));
  page.runs = reply.runs.map((overview) => {
    const run = byName.get(overview.name) ?? new RunData(overview);
    run.take(overview);
    return run;
  });
  page.comparison.take(page.runs);
  page.samples.take(page.runs);
  page.settings.update(page.runs);
  if (byId("token-form").hidden === false || !byId("tabs").childElementCount) {
    show(byId("token-form"), false);
    showTabs();
  }
}

function plan() {
  clearTimeout(timer);
  // A hidden page sends no requests; it catches up when it is visible again.
  if (!document.hidden) timer = setTimeout(poll, isDue ? 0 : POLL_MILLISECONDS);
}

function fail(error) {
  if (error instanceof TokenError) {
    page.turns = 0;
    askToken(hasToken());
    return;
  }
  if (!(error instanceof UnreachableError)) throw error;
  const advice = page.isLive
    ? ` If the run has ended, open it with: grpo view ${page.runs[0]?.path ?? "RUN_DIR"}`
    : "";
  setText(byId("trouble"), `No answer since ${clock(page.answered)} (${error.message}); trying again.${advice}`);
  show(byId("trouble"), true);
  page.turns = 0;
  plan();
}

function showTabs() {
  const names = Object.keys(TABS).filter((name) => name !== "components" || page.isLive);
  byId("tabs").replaceChildren(...names.map((name) => h("a", { href: `#${name}` }, TABS[name])));
  show(byId("tabs"), true);
  showTab();
}

function showTab() {
  const wanted = location.hash.slice(1);
  page.tab = wanted in TABS && (wanted !== "components" || page.isLive) ? wanted : "plots";
  for (const name of Object.keys(TABS)) show(byId(name), name === page.tab);
  for (const link of byId("tabs").children) {
    if (link.hash === `#${page.tab}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (page.tab === "samples" && page.runs.length) page.samples.refresh();
  draw();
}

let frame = null;

/** Draws once for all that changes before the next frame. */
function drawSoon() {
  frame ??= requestAnimationFrame(draw);
}

function draw() {
  frame = null;
  const { runs, now } = page;
  if (!runs.length) return;
  showHeader(runs, now);
  if (page.tab === "plots") {
    if (runs.length > 1) page.comparison.update();
    const summary = runs.length > 1 ? page.comparison.element : summarise(runs[0], now);
    if (byId("summary").firstChild !== summary) byId("summary").replaceChildren(summary);
    page.plots.update(runs);
  }
  if (page.tab === "components" && now) showComponents(now);
}

function showHeader(runs, now) {
  const [run] = runs;
  const isOne = runs.length === 1;
  setText(byId("title"), isOne ? run.name : `${runs.length} runs`);
  const unwell = (now?.components ?? []).filter((component) => look(component.state) === "bad");
  const ended = run.isOver && !(now && now.phase !== "finished");
  const [word, kind] = ended
    ? [run.state, run.state === "succeeded" ? "good" : "bad"]
    : unwell.length
      ? [`${unwell.map((component) => component.name).join(", ")} unwell`, "bad"]
      : now
        ? [now.phase, "live"]
        : [run.state, run.state === "running" ? "live" : "fair"];
  const state = byId("state");
  show(state, isOne);
  setText(state, word);
  state.className = `pill ${kind}`;
  const source = now?.components.find(({ name }) => name === "data-server")?.figures.source;
  const facts = (each) => [each.settings.model_name ?? each.summary.model, each.summary.dataset ?? source, each.summary.device];
  const common = facts(run).filter((fact, n) => fact && runs.every((each) => facts(each)[n] === fact));
  setText(byId("about"), [...common, isOne && run.familyIn(runs)].filter(Boolean).join(" · "));
  const step = run.last("step") ?? 0;
  const total = now?.total_steps || (ended ? step : 0);
  show(byId("progress"), isOne && total > 0);
  if (isOne && total > 0) {
    byId("progress-bar").max = total;
    byId("progress-bar").value = Math.min(step, total);
    const pace = run.recent("seconds_step", 5);
    const left = ended || pace === null ? "" : `, ${duration(pace * (total - step))} left`;
    const took = ended && run.summary.seconds ? `, ${duration(run.summary.seconds)} of training` : "";
    setText(byId("progress-text"), `step ${count(step)} of ${count(total)}${took}${left}`);
  }
  const error = isOne && run.isOver ? (run.error ?? "") : "";
  setText(byId("error"), error);
  show(byId("error"), error !== "");
  const damage = isOne ? run.damage.join("; ") : "";
  setText(byId("damage"), damage);
  show(byId("damage"), damage !== "");
  const title = isOne ? `${number(run.last("reward_mean"))} · step ${count(step)} · ${run.name}` : `${runs.length} runs`;
  if (document.title !== title) document.title = title;
}

start();
