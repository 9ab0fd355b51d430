// One lane of the race: a clock, figures and the text as it comes.

import { Body } from "./body.js";
import { h, perFrame } from "./dom.js";
import { clock, count, short } from "./figures.js";

const STATES = { idle: "", waiting: "Waits for its turn", running: "Running", whole: "Finished", stopped: "Stopped" };

/** A lane. `name`: zip or base. */
export class Lane {
  constructor(name, title) {
    const figure = (id, label) => {
      this[id] = h("b", { "data-testid": `lane-${id}` }, "–");
      return h("div", {}, this[id], h("span", {}, label));
    };
    this.label = h("p", { class: "label", "data-testid": "lane-label" });
    this.quality = h("p", { class: "quiet", "data-testid": "lane-quality" });
    this.state = h("span", { class: "state", "data-testid": "lane-state" });
    this.text = h("div", { class: "text", "data-testid": "lane-text", dir: "auto", tabindex: "0", role: "region", "aria-label": `${title}: answer` });
    const figures = h("div", { class: "figures" }, figure("speed", "base tokens/s"), figure("clock", "time"), figure("steps", "steps"), figure("tokens", "base tokens"));
    const head = h("header", {}, h("h3", {}, title), this.state, this.label, this.quality);
    this.element = h("article", { class: `lane ${name}`, "data-testid": `lane-${name}`, "aria-label": title }, head, figures, this.text);
    this.body = new Body(this.text);
    this.draw = perFrame(() => this.#draw());
    this.reset("idle", "", "");
  }

  /** Empties the lane. state: one of STATES. */
  reset(state, label, quality) {
    Object.assign(this, { shown: "", known: null, figures: null, since: null });
    this.body.plain("");
    this.describe(label, quality);
    this.#state(state);
    for (const id of ["clock", "speed", "steps", "tokens"]) this[id].textContent = "–";
  }

  describe(label, quality) {
    this.label.textContent = label ?? "";
    this.quality.textContent = quality ? `Quality: ${quality}` : "";
  }

  /** The lane's turn begins. */
  start({ label, model, quality }) {
    this.describe(label || model, quality);
    this.#state("running");
  }

  /** Takes one frame of the lane's answer. The clock starts with the first one. */
  take(frame) {
    this.since ??= performance.now();
    if (frame.type === "text") {
      this.shown += frame.text;
      if (frame.tokens?.length) (this.known ??= []).push(...frame.tokens);
    } else if (frame.type === "figures") this.figures = frame;
    else if (frame.type === "done") return this.finish(frame.message?.figures ?? this.figures);
    this.draw();
    return undefined;
  }

  /** The lane's answer is whole; its figures are final. */
  finish(figures) {
    this.figures = figures ?? this.figures;
    this.end("whole");
  }

  end(state) {
    if (this.element.dataset.state !== "whole") this.#state(state);
    this.since = null;
    this.#draw();
  }

  #state(state) {
    this.element.dataset.state = state;
    this.state.textContent = STATES[state];
  }

  #draw() {
    const { figures } = this;
    if (this.shown) this.body.grow(this.shown, this.known);
    const running = this.since !== null;
    const seconds = running ? (performance.now() - this.since) / 1000 : figures?.seconds;
    if (seconds !== undefined) this.clock.textContent = clock(seconds);
    if (figures) {
      this.speed.textContent = short(figures.base_tokens_per_s);
      this.steps.textContent = count(figures.steps);
      this.tokens.textContent = count(figures.base_tokens);
    }
    if (!running) return;
    this.text.scrollTop = this.text.scrollHeight;
    this.draw();
  }
}

/** Returns the outcome as a sentence that begins with the speeds, and what else there is to know of it. */
export function verdict(zip, base) {
  if (!zip?.base_tokens_per_s || !base?.base_tokens_per_s) return ["Finished.", ""];
  const ratio = zip.base_tokens_per_s / base.base_tokens_per_s;
  const faster = ratio >= 1 ? `${ratio.toFixed(2)} times as fast` : `${ratio.toFixed(2)} times the speed, which is slower`;
  const perStep = `${(zip.base_tokens / zip.steps).toFixed(2)} base tokens per step against ${(base.base_tokens / base.steps).toFixed(2)}`;
  const speeds = `${short(zip.base_tokens_per_s)} against ${short(base.base_tokens_per_s)} base tokens/s`;
  const lengths = `The texts differ in length, ${count(zip.base_tokens)} against ${count(base.base_tokens)} base tokens, so their times do not compare. `;
  const differ = zip.base_tokens === base.base_tokens ? "" : lengths;
  return [`${speeds}: with hypertokens ${faster}.`, `${perStep}. ${differ}One run each, on this machine.`];
}
