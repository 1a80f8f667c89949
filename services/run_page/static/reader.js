// The dialog that shows one answer whole: an episode as a conversation with its branches, and any answer's tokens.

import { get } from "./api.js";
import { answers, figures, meanReward } from "./answers.js";
import { conversation } from "./conversation.js";
import { h } from "./dom.js";
import { count, number } from "./format.js";
import { largestAdvantage, tokens } from "./tokens.js";

export class Reader {
  /** Calls ``fail`` with the error of a request. */
  constructor(fail) {
    this.fail = fail;
    this.head = h("div");
    this.body = h("div", { class: "reading" });
    const close = h("button", { type: "button", onclick: () => this.element.close() }, "Close");
    this.element = h("dialog", { id: "reader", "aria-labelledby": "reader-title" }, h("div", { class: "closing" }, close), this.head, this.body);
  }

  /** Shows answer ``place`` of a ``group`` of ``run``, from its training or its evaluations. */
  open(run, source, group, place) {
    const records = answers(group)[place];
    const hasConversation = records.some((record) => record.messages?.length);
    const last = records.findIndex((record) => record.messages?.some((message) => message.is_last));
    Object.assign(this, { run, source, group, place, branch: Math.max(last, 0), isLoaded: false, showsTokens: !hasConversation });
    this.draw();
    this.element.showModal();
    if (this.showsTokens) this.load();
  }

  /** Reads the group again with its tokens. */
  async load() {
    const { group, run, source } = this;
    try {
      const reply = await get("api/groups", { run, source, before: group.number + 1, limit: 1, tokens: true });
      if (group !== this.group) return;
      // A resumed run replaces its file.
      const isThere = reply.groups[0]?.number === group.number && reply.groups[0].group_id === group.group_id;
      this.isLoaded = true;
      this.group = isThere ? reply.groups[0] : { ...group, completions: group.completions.map((c) => ({ ...c, spans: undefined })) };
      this.draw();
    } catch (error) {
      this.element.close();
      this.fail(error);
    }
  }

  draw() {
    const { group, place, branch, showsTokens } = this;
    const records = answers(group)[place];
    const record = records[branch];
    const choose = (change) => () => {
      Object.assign(this, change);
      this.draw();
      if (this.showsTokens && !this.isLoaded) this.load();
    };
    const button = (text, isChosen, change) => h("button", { type: "button", "aria-pressed": String(isChosen), onclick: choose(change) }, text);
    const choice = (label, buttons) => h("div", { class: "choices", role: "group", "aria-label": label }, buttons);
    const focused = document.activeElement?.textContent;
    const where = `${group.group_id ? ` of group ${group.group_id}` : ""}, step ${count(group.step)}`;
    const isEpisode = record.episode !== undefined || record.messages?.length;
    this.head.replaceChildren(
      h("h2", { id: "reader-title" }, `${isEpisode ? "Episode" : "Completion"} ${count((record.episode ?? place) + 1)}${where}`),
      h("p", null, "reward ", h("b", null, number(record.reward)), h("span", { class: "muted" }, facts(records).map((fact) => ` · ${fact}`))),
      records.length > 1 ? choice("branches", records.map((_, n) => button(n ? `Branch ${n}` : "Main line", n === branch, { branch: n }))) : "",
      record.messages?.length && record.spans
        ? choice("form", [button("Conversation", !showsTokens, { showsTokens: false }), button("Tokens", showsTokens, { showsTokens: true })])
        : "",
    );
    this.body.replaceChildren(showsTokens ? this.tokens(record) : conversation(record.messages ?? [], records.slice(0, branch).map((r) => r.messages ?? [])));
    // The buttons are new ones; the focus stays on the one that was pressed.
    [...this.head.querySelectorAll("button")].find((b) => b.textContent === focused)?.focus();
  }

  tokens(record) {
    if (!record.spans) return h("p", null, "The tokens of this answer are not in the file; it has only a part of each step's.");
    if (!this.isLoaded) return h("p", { class: "muted" }, "Loading …");
    const isMean = record.reward !== null && record.reward === meanReward(this.group);
    const isEqual = answers(this.group).every(([first]) => first.reward === record.reward);
    const why = isEqual ? ": all rewards of the group are equal" : isMean ? ": the reward is the group's mean" : "";
    return tokens(this.group.rendered_prompt ?? "", record.spans, largestAdvantage(this.group.completions), why);
  }
}

function facts(records) {
  const [first] = records;
  return [...figures(records).map(([name, value]) => `${name} ${value}`), first.result?.reason].filter(Boolean);
}
