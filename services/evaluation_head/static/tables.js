// The tiles and tables. Names and details come from servers, so they are inserted as text only.

import { h, setText } from "./dom.js";
import { duration, number } from "./format.js";

const LOOKS = { connected: "good", starting: "fair", silent: "bad", unreachable: "bad" };

export function showTiles(element, stats) {
  const { episodes, returns, latency_ms: latency } = stats;
  const torch = stats.policies.filter((policy) => policy.batches);
  const [states, batches] = ["states", "batches"].map((key) => torch.reduce((sum, policy) => sum + policy[key], 0));
  const tiles = [
    ["servers", stats.servers.filter(({ state }) => state === "connected").length, `of ${stats.servers.length} known`],
    ["states a second", number(stats.states_per_second), `${number(stats.states)} in all`],
    ["requests a second", number(stats.requests_per_second), `${number(stats.requests)} in all`],
    ["batch size", batches ? number(states / batches) : "–", `${number(batches)} batches`],
    ["latency", latency.p50 === null ? "–" : `${number(latency.p50)} ms`, latency.p99 === null ? "" : `99 %: ${number(latency.p99)} ms`],
    ["active episodes", episodes.active, `${number(episodes.finished)} finished, ${number(episodes.lost)} lost`],
    ["mean return", number(returns.mean), returns.deviation === null ? "" : `± ${number(returns.deviation)}`],
    ["turned away", number(stats.overloaded), "requests, by overload"],
  ];
  if (element.childElementCount !== tiles.length) {
    element.replaceChildren(
      ...tiles.map(([name]) => h("div", { class: "card", "data-name": name }, h("dt", null, name), h("dd", null, h("b"), h("span", { class: "muted" })))),
    );
  }
  tiles.forEach(([, value, note], i) => {
    setText(element.children[i].querySelector("b"), String(value));
    setText(element.children[i].querySelector("dd span"), note);
  });
}

export function showServers(table, servers) {
  const rows = servers.map((server) => ({
    key: server.name,
    cells: [
      noted(server.name, server.detail ?? server.url),
      pill(server.state, LOOKS[server.state]),
      server.mode,
      server.environment ?? "–",
      server.policy ?? "–",
      count(server.active),
      count(server.finished),
      count(server.lost),
      count(number(server.returns.mean)),
      count(number(server.states)),
      count(duration(server.seconds_since_heard)),
    ],
  }));
  const names = ["server", "state", "mode", "environment", "policy", ">active", ">finished", ">lost", ">mean return", ">states", ">heard"];
  fill(table, names, rows, "No server has come yet. Set EVAL_HEAD_ENDPOINT on an environment server, or let the head discover one.");
}

export function showDiscovered(table, status, discovery) {
  const rows = discovery.servers.map((server) => ({
    key: server.name,
    cells: [server.name, server.source, server.status, wide(server.url ?? "no address")],
  }));
  const none = discovery.enabled
    ? "None found."
    : "Nothing to ask: give GAME_SERVER_ADDRESSES, or SKYPILOT_API_SERVER_ENDPOINT.";
  fill(table, ["server", "source", "status", "address"], rows, none);
  const errors = Object.entries(discovery.errors).map(([source, error]) => `${source}: ${error}`);
  const age = discovery.age_seconds === null ? "not looked yet" : `looked ${duration(discovery.age_seconds)} ago`;
  setText(status, [age, discovery.prefix ? `names beginning with ${discovery.prefix}` : "", ...errors].filter(Boolean).join(" · "));
}

export function showPolicies(table, policies) {
  const rows = policies.map((policy) => ({
    key: policy.name,
    cells: [
      policy.name,
      policy.kind,
      count(policy.version ?? "–"),
      policy.device ?? "",
      count(number(policy.parameters)),
      count(number(policy.states)),
      count(number(policy.waiting)),
      count(policy.batches ? `${number(policy.states / policy.batches)} of ${policy.batch_size}` : "–"),
      count(policy.batches ? `${number((1000 * policy.compute_seconds) / policy.batches)} ms` : "–"),
      wide(policy.trouble ?? policy.file ?? policy.url ?? ""),
    ],
  }));
  fill(table, ["policy", "kind", ">version", "device", ">parameters", ">states", ">waiting", ">batch", ">compute", "detail"], rows, "");
}

const pill = (text, look) => h("span", { class: `pill ${look ?? "fair"}` }, text);
const count = (value) => ({ className: "number", value: String(value) });
const noted = (name, note) => ({ className: "named", value: h("div", null, name, note && note !== `http://${name}` ? h("span", { class: "note" }, note) : "") });
const wide = (value) => ({ className: "wide", value });

function fill(table, names, rows, none) {
  // An unchanged table is left alone, so that a selection or a screen reader keeps its place.
  const signature = JSON.stringify(rows.map(({ cells }) => cells.map((cell) => cell?.value?.textContent ?? cell?.value ?? cell?.textContent ?? cell)));
  if (table.dataset.signature === signature) return;
  table.dataset.signature = signature;
  const head = h("tr", null, names.map((name) => h("th", { scope: "col", class: name.startsWith(">") ? "number" : null }, name.replace(">", ""))));
  const body = rows.map(({ key, cells }) =>
    h("tr", { "data-name": key }, cells.map((cell) => h("td", { class: cell?.value === undefined ? null : cell.className }, cell?.value ?? cell))),
  );
  const empty = h("tr", null, h("td", { colspan: names.length, class: "muted wide" }, none));
  table.replaceChildren(h("thead", null, head), h("tbody", null, body.length ? body : empty));
}
