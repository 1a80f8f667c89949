// A sequence of tokens, coloured by what training did with them: read as context, made likelier, made less likely.

import { h, setText } from "./dom.js";
import { count, number } from "./format.js";

const LEGEND = [
  ["plus", "likelier: advantage above 0"],
  ["minus", "less likely: advantage below 0"],
  ["zero", "advantage 0: neither"],
  ["untrained", "sampled, not trained on"],
  ["context", "context: read only"],
];

/** Returns the largest size of an advantage in ``records``. */
export function largestAdvantage(records) {
  const sizes = records.flatMap((record) => record.spans ?? []).flatMap((span) => [span.advantages ?? 0].flat().map(Math.abs));
  return sizes.reduce((a, b) => Math.max(a, b), 0);
}

/**
 * Returns a sequence's ``prompt`` and ``spans``, with a legend and a line that tells of the token under the mouse or the
 * cursor. An advantage of size ``largest`` has the strongest colour; ``why`` is said of an advantage of 0.
 */
export function tokens(prompt, spans, largest, why) {
  const explanation = h("p", { class: "explanation", role: "status" }, "Point at a token, or move with the arrow keys.");
  const facts = new Map();
  const text = h("pre", { class: "tokens", tabindex: "0", role: "group", "aria-label": "tokens" }, h("span", { class: "context" }, prompt));
  let version = null;
  for (const span of spans) {
    if (span.text !== undefined) {
      text.append(h("span", { class: "context" }, span.text));
      continue;
    }
    if (span.version !== version) text.append(h("span", { class: "version" }, `version ${count(span.version)}`));
    version = span.version;
    for (const [place, word] of span.tokens.entries()) {
      const advantage = Array.isArray(span.advantages) ? span.advantages[place] : span.advantages;
      const element = token(word, advantage, largest);
      facts.set(element, { word, advantage, version, logprob: span.logprobs[place], number: facts.size + 1 });
      text.append(element);
    }
  }
  const elements = [...facts.keys()];
  let cursor = -1;
  const move = (to) => {
    elements[cursor]?.classList.remove("at");
    cursor = to;
    elements[cursor].classList.add("at");
    setText(explanation, describe(facts.get(elements[cursor]), elements.length, why));
  };
  text.addEventListener("pointerover", ({ target }) => facts.has(target) && move(elements.indexOf(target)));
  text.addEventListener("keydown", (event) => {
    const to = { ArrowRight: cursor + 1, ArrowLeft: cursor - 1, Home: 0, End: elements.length - 1 }[event.key];
    if (to === undefined || !elements[to]) return;
    event.preventDefault();
    move(to);
    elements[to].scrollIntoView({ block: "nearest" });
  });
  return h("div", null, legend(), explanation, text);
}

function legend() {
  return h("ul", { class: "legend token-legend" }, LEGEND.map(([kind, words]) => h("li", null, h("span", { class: sample(kind) }, words))));
}

const sample = (kind) => (kind === "context" ? kind : `token ${kind}`);

function token(word, advantage, largest) {
  const kind = advantage === null ? "untrained" : { 1: "plus", "-1": "minus", 0: "zero" }[Math.sign(advantage)];
  const element = h("span", { class: sample(kind) }, word);
  if (advantage) element.style.setProperty("--strength", Math.abs(advantage) / largest);
  return element;
}

function describe({ word, advantage, version, logprob, number: place }, total, why) {
  const likely = `probability ${number(Math.exp(logprob))} (log ${number(logprob)})`;
  const trained = advantage === null ? "not trained on" : `advantage ${number(advantage)}${advantage ? "" : why}`;
  return `${count(place)} of ${count(total)} sampled tokens: ${JSON.stringify(word)}, ${likely}, ${trained}, policy version ${count(version)}`;
}
