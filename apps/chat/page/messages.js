// One message on the page: its text, state, figures, and what can be done with it.

import { Body } from "./body.js";
import { button, h } from "./dom.js";
import { isMarked } from "./entries.js";
import { difference, plural, summary } from "./figures.js";
import { isFirst, siblings } from "./tree.js";

const STATES = {
  stopped: "Stopped",
  cut: "Cut off: the server went away",
  failed: "Failed",
};

/** A message's element and the means to keep it up to date. `act(name, message)` is called for what the user chooses. */
export class MessageView {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.text = h("div", { class: "text", "data-testid": "message-text", dir: "auto" });
    this.body = message.role === "assistant" ? new Body(this.text) : null;
    this.notes = h("div", { class: "notes" });
    this.tools = h("div", { class: "tools", role: "group", "aria-label": "Actions" });
    const who = message.role === "assistant" ? "Answer" : "You";
    this.reasoning = null;
    this.element = h(
      "article",
      { class: `message ${message.role}`, "data-testid": "message", "data-id": message.id, "data-role": message.role, "aria-label": who },
      this.text,
      this.notes,
      this.tools,
    );
    this.rich = false; // whether the text is drawn as Markdown
    this.plain();
  }

  /** Shows the text as it stands; `enrich` draws it when the message comes near the screen. */
  plain() {
    if (this.body) this.body.plain(this.message.text);
    else this.text.textContent = this.message.text;
  }

  /** Draws the text as Markdown with its tokens, once. */
  enrich() {
    if (this.rich || !this.body) return;
    this.rich = true;
    this.#reasoning();
    if (this.message.state === "running") this.body.grow(this.message.text, this.message.tokens);
    else this.body.set(this.message.text, this.message.tokens);
  }

  /** Brings everything up to date: called at most once per frame while an answer streams. */
  update(conversation, last) {
    const { message } = this;
    this.element.dataset.state = message.state ?? "whole";
    this.element.classList.toggle("last", last);
    if (this.body && (message.state === "running" || this.rich)) this.#grow();
    else if (!this.body) this.text.textContent = message.text;
    this.#notes(conversation, last);
    this.#tools(conversation, last);
  }

  #grow() {
    const { message, body } = this;
    this.rich = true;
    this.#reasoning();
    if (message.text.startsWith(body.shown)) body.grow(message.text, message.tokens);
    else body.set(message.text, message.tokens);
    if (message.state !== "running" && this.wasRunning) body.set(message.text, message.tokens);
    this.wasRunning = message.state === "running";
    this.element.classList.toggle("silent", this.wasRunning && !message.text);
  }

  #reasoning() {
    const { reasoning } = this.message;
    if (!reasoning) return;
    if (!this.reasoning) {
      this.reasoning = h("p", {});
      const fold = h("details", { class: "reasoning", "data-testid": "reasoning" }, h("summary", {}, "Reasoning"), this.reasoning);
      this.text.before(fold);
    }
    if (this.reasoning.textContent.length !== reasoning.length) this.reasoning.textContent = reasoning;
  }

  #notes(conversation, last) {
    const { message } = this;
    const parts = [];
    const state = STATES[message.state];
    if (state) {
      const reason = message.reason && message.state === "failed" ? `: ${message.reason}` : "";
      parts.push(h("span", { class: `state ${message.state}`, "data-testid": "message-state" }, state + reason));
    } else if (message.state === "running") parts.push(...waiting(message));
    const figures = message.state === "running" ? "" : summary(message.figures);
    if (figures) parts.push(h("span", { "data-testid": "message-figures" }, figures));
    const differs = figures && !isFirst(conversation.messages, message) && difference(message.figures);
    if (differs) parts.push(h("details", { class: "differs", "data-testid": "message-differs" }, h("summary", {}, differs[0]), differs[1]));
    if (message.reason === "length") parts.push(h("span", {}, "ended at the limit"));
    const same = message.role === "assistant" && message.state === "whole" ? sameAs(conversation, message) : 0;
    if (same) parts.push(h("span", { "data-testid": "message-same" }, `the same text as version ${same}`));
    if (last && message.tokens?.some(isMarked)) parts.push(legend(message.tokens));
    const key = parts.map((part) => part.textContent).join("|");
    if (key === this.noted) return;
    this.noted = key;
    this.notes.replaceChildren(...parts);
  }

  #tools(conversation, last) {
    const { message } = this;
    const branches = siblings(conversation.messages, message);
    const place = branches.indexOf(message);
    const key = [message.state, last, branches.length, place, conversation.running, message.reason, Boolean(message.tokens)].join();
    if (key === this.tooled) return;
    this.tooled = key;
    const kept = this.tools.contains(document.activeElement) ? document.activeElement.dataset.testid : null;
    const busy = conversation.running;
    this.tools.replaceChildren(...this.#branches(branches, place), ...(message.state === "running" ? [] : this.#actions(last, busy)));
    if (kept) this.tools.querySelector(`[data-testid="${kept}"]`)?.focus();
  }

  #branches(branches, place) {
    if (branches.length < 2) return [];
    const to = (by) => () => this.act("switch", branches[place + by]);
    const arrow = (name, drawn, by) =>
      button(`${name} version`, { icon: drawn, "data-testid": `branch-${name.toLowerCase()}`, disabled: !branches[place + by], onclick: to(by) });
    const shown = h("span", { class: "place", "data-testid": "branch-place" }, `${place + 1} / ${branches.length}`);
    return [h("span", { class: "branches" }, arrow("Previous", "left", -1), shown, arrow("Next", "right", 1))];
  }

  #actions(last, busy) {
    const { message } = this;
    const tool = (name, label, drawn) =>
      button(label, { icon: drawn, "data-testid": name, disabled: busy && name !== "copy" && name !== "inspect", onclick: (event) => this.act(name, message, event) });
    if (message.role === "user") {
      return [tool("edit", "Edit and send again", "edit"), tool("copy", "Copy", "copy"), tool("race-this", "Race this request", "flag")];
    }
    const actions = [tool("copy", "Copy", "copy"), tool("regenerate", "Answer again", "redo")];
    const unfinished = message.state === "failed" ? message.text : message.state !== "whole" || message.reason === "length";
    if (last && unfinished) actions.push(tool("continue", "Continue", "play"));
    if (message.tokens?.some(isMarked)) actions.push(tool("inspect", `Step through the ${markedOf(message.tokens)}`, "tint"));
    return actions;
  }
}

/** What the marks of these tokens mean: shown under the newest answer while they are tinted. */
function legend(tokens) {
  const sample = (kind, label) => h("span", { class: `tok ${kind}` }, label);
  const lengths = [sample("l2", "2"), sample("l3", "3"), sample("l4", "4"), sample("l5", "5+"), "base tokens in one step"];
  const drafted = [sample("l1 drafted", "drafted"), "no pass of its own"];
  const shown = [...(tokens.some((token) => token.p?.length) ? lengths : []), ...(tokens.some((token) => token.d) ? drafted : [])];
  return h("span", { class: "legend text-legend", "data-testid": "text-legend" }, ...shown);
}

/** Returns what the marked ones among these tokens are called. */
function markedOf(tokens) {
  const kinds = [["hypertokens", (token) => token.p?.length], ["drafted tokens", (token) => token.d]];
  return kinds.filter(([, holds]) => tokens.some(holds)).map(([name]) => name).join(" and ");
}

/** Returns the number of the first version before a message that has its text; 0 if there is none. */
function sameAs(conversation, message) {
  const branches = siblings(conversation.messages, message);
  const first = branches.findIndex((other) => other.text === message.text);
  return first < branches.indexOf(message) ? first + 1 : 0;
}

function waiting({ waiting: known, text }) {
  if (text) return [];
  const { read, total, cached_tokens: cached, waits_for: other } = known ?? {};
  if (other) return [h("span", { class: "state" }, `Waiting for ${other} to finish`)];
  if (!total) return [h("span", { class: "state" }, "Waiting")];
  const remembered = cached ? ` (${plural(cached, "token")} remembered)` : "";
  return [h("span", { class: "state" }, `Reading the conversation: ${read} of ${total}${remembered}`)];
}
