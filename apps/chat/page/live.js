// The line of figures above the message box, while an answer streams and after.

import { on } from "./bus.js";
import { button, byId, h, perFrame } from "./dom.js";
import { bounded, bytes, count, passes, percent, short, stepsSaved } from "./figures.js";
import { show } from "./menu.js";
import { app } from "./model.js";

// Words that are left out where the line has little room.
const more = (text) => h("span", { class: "more" }, text);

/** A figure of the line: an element with a number, a label, and a bar if it has a limit. */
class Figure {
  constructor(name, label, { bar = false, hint = "" } = {}) {
    this.number = h("b", {});
    this.limit = h("b", { class: "limit" });
    this.label = h("span", {}, ...label);
    this.bar = bar ? h("i", { class: "bar", "aria-hidden": "true" }, h("i", { class: "fill" })) : null;
    this.element = h("div", { class: "figure", "data-testid": `live-${name}`, title: hint }, this.number, this.limit, this.label, this.bar);
    this.hint = hint;
    this.meaning = hint;
  }

  /** What the line says without its number. */
  get name() {
    return this.label.textContent;
  }

  set(text, fraction = 0, limit = "") {
    this.element.hidden = text === null;
    if (text === null) return;
    if (this.number.textContent !== text) this.number.textContent = text;
    if (this.limit.textContent !== limit) this.limit.textContent = limit;
    if (this.bar) this.bar.firstElementChild.style.width = percent(fraction).replace(" ", "");
  }
}

const line = {
  speed: new Figure("speed", ["base tokens/s"], { hint: "How fast the text comes. Base tokens are the pieces of text that the model without hypertokens reads and writes." }),
  perStep: new Figure("per-step", ["per step"], { hint: "Base tokens that one step of the model writes. Without hypertokens this is 1." }),
  saved: new Figure("saved", [more("steps "), "saved"], { hint: "Steps that the model without hypertokens would have needed beyond these." }),
  perPass: new Figure("per-pass", ["per pass"], { hint: "Base tokens that one pass of the model gives. A pass checks several drafted ids at once, so it may take several steps." }),
  accepted: new Figure("accepted", ["drafted"], { bar: true, hint: "Ids that were drafted and accepted, as a share of all drafted ones. None of these took a pass of its own." }),
  wasted: new Figure("wasted", [more("ids "), "wasted"], { hint: "Ids that were drafted, checked and refused." }),
  codebook: new Figure("codebook", ["entries"], { bar: true, hint: "Hypertokens that this conversation has, of those that its codebook can hold." }),
  memory: new Figure("memory", ["cache", more(" saved")], { hint: "Memory (KV cache) that the model without hypertokens would need beyond this." }),
  ceiling: new Figure("ceiling", ["of ceiling"], { bar: true, hint: "Passes of the model per second, as a share of the most that this machine can do." }),
};

const ofDrafts = [line.perPass, line.accepted, line.wasted];

/** Makes the line. */
export function startLive() {
  const help = button("What these figures mean", { text: true, class: "help", "data-testid": "live-help" });
  help.replaceChildren("?");
  help.setAttribute("aria-label", "What these figures mean");
  line.speed.element.append(help);
  byId("live").append(...Object.values(line).map((figure) => figure.element));
  byId("live").addEventListener("click", explain);
  on("figures shown path answering answered state", draw);
}

/** Says in words what the figures are that the line shows at the moment. */
function explain() {
  const shown = Object.values(line).filter((figure) => !figure.element.hidden);
  const rows = shown.flatMap((figure) => [h("dt", {}, figure.name), h("dd", {}, figure.meaning)]);
  const done = button("Done", { class: "primary", onclick: () => dialog.close() });
  const dialog = show(h("h2", { id: "dialog-title" }, "What these figures mean"), h("dl", { class: "meanings" }, ...rows), h("div", { class: "row" }, done));
  done.focus();
}

const draw = perFrame(() => {
  const conversation = app.conversation;
  const figures = figuresOf(conversation);
  const place = byId("live");
  place.hidden = !figures && !conversation?.running;
  if (figures) fill(figures);
  else for (const figure of Object.values(line)) figure.set(ofDrafts.includes(figure) ? null : "–"); // the first answer is on its way: the line has its place already
});

/** Returns the figures of the answer that streams, else of the last one on the screen, else null. */
function figuresOf(conversation) {
  if (!conversation) return null;
  if (conversation.current?.figures) return conversation.current.figures;
  return conversation.path.findLast((message) => message.figures)?.figures ?? null;
}

function fill(figures) {
  const { entries, codebook_size: size, kv_bytes_saved: saved } = figures;
  line.speed.set(short(figures.base_tokens_per_s));
  line.perStep.set(Number.isFinite(figures.base_tokens_per_step) ? figures.base_tokens_per_step.toFixed(2) : null);
  line.saved.set(count(stepsSaved(figures)));
  fillDrafts(figures);
  line.codebook.set(size ? count(entries) : null, bounded(entries / size), `/ ${count(size)}`);
  line.memory.set(saved ? bytes(saved) : null);
  const ceiling = app.state?.ceiling?.steps_per_s;
  const perSecond = passes(figures) / figures.seconds;
  const share = perSecond / ceiling;
  line.ceiling.set(ceiling && figures.seconds ? percent(share) : null, bounded(share));
  line.ceiling.meaning = `${line.ceiling.hint} Here: ${short(perSecond)} of ${short(ceiling)} per second (measured).`;
  line.ceiling.element.title = ceiling ? line.ceiling.meaning : "";
}

/** Shows what drafts did, nothing where there were none. */
function fillDrafts({ base_tokens, steps, proposed, accepted }) {
  for (const figure of ofDrafts) figure.set(null);
  if (!proposed) return;
  line.perPass.set(short(base_tokens / passes({ steps, accepted })));
  line.accepted.set(percent(accepted / proposed), bounded(accepted / proposed));
  line.wasted.set(count(proposed - accepted));
}
