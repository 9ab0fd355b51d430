// The vocabulary as this conversation uses it: how full it is, its most used entries, what it learned last, and drafts.

import { on } from "./bus.js";
import { byId, h } from "./dom.js";
import { Entries, visible } from "./entries.js";
import { bounded, count, draftFigures, drafts, percent, plural } from "./figures.js";
import { app } from "./model.js";

const MOST = 40;
const NEWEST = 8;
const EVERY_MS = 250; // between two drawings while an answer streams

const ORIGINS = { pack: "pack", prompt: "prompt", answer: "answer" };
let entries = new Entries();
let timer = null;
const place = {};

/** Returns the content of the tab. */
export function vocabulary() {
  place.fill = h("i", { class: "fill" });
  place.count = h("p", { class: "quiet" });
  place.most = h("ol", { class: "entries", "data-testid": "entries" });
  place.newest = h("ul", { class: "learned", "data-testid": "learned" });
  place.none = h("p", { class: "quiet" }, "The entries that answers use appear here as they are written.");
  place.drafts = h("p", { class: "quiet", "data-testid": "drafts" });
  place.drafted = h("section", { hidden: true }, h("h2", {}, "Drafts"), place.drafts);
  place.fresh = h("section", { hidden: true }, h("h2", {}, "Learned last"), place.newest);
  on("shown path", recount);
  on("tokens", ({ conversation, tokens }) => ifCurrent(conversation, () => entries.use(tokens)));
  on("learned", ({ conversation, entries: fresh }) => ifCurrent(conversation, () => entries.learn(fresh)));
  on("figures", soon);
  on("panel", (shown) => shown === "vocabulary" && app.conversation && draw());
  return [
    h("section", {}, h("h2", {}, "Tint"), legend()),
    h("section", {}, h("h2", {}, "Codebook"), h("i", { class: "bar wide", "aria-hidden": "true" }, place.fill), place.count),
    place.drafted,
    h("section", {}, h("h2", {}, "Most used entries"), place.none, place.most),
    place.fresh,
  ];
}

function legend() {
  const item = (length, label) => h("li", {}, h("span", { class: `tok l${length}` }, label));
  const items = [item(2, "2"), item(3, "3"), item(4, "4"), item(5, "5 or more")];
  const lengths = h("p", { class: "quiet" }, "Base tokens in one step. Text without a tint took one step per token.");
  const drafted = h("p", { class: "quiet" }, h("span", { class: "tok l1 drafted" }, "Dots below"), ": drafted, so it took no pass of its own.");
  return h("div", { class: "legend", "data-testid": "legend" }, h("ul", {}, items), lengths, drafted);
}

function ifCurrent(conversation, run) {
  if (conversation !== app.conversation) return;
  run();
  soon();
}

function recount() {
  entries = new Entries();
  for (const message of app.conversation.path) {
    entries.use(message.tokens);
    entries.learn(message.learned);
  }
  soon();
}

function soon() {
  timer ??= setTimeout(() => {
    timer = null;
    if (!byId("panel-vocabulary").hidden) draw();
  }, EVERY_MS);
}

function draw() {
  const most = entries.most(MOST);
  const top = most[0]?.uses ?? 1;
  place.none.hidden = most.length > 0;
  place.most.replaceChildren(...most.map((entry) => row(entry, top)));
  const newest = entries.newest(NEWEST);
  place.fresh.hidden = !newest.length;
  place.newest.replaceChildren(...newest.map((parts) => h("li", {}, chip(parts))));
  drawFill();
  drawDrafts();
}

function drawDrafts() {
  const text = drafts(draftFigures(app.conversation.path.map((message) => message.figures)));
  place.drafts.textContent = text;
  place.drafted.hidden = !text;
}

function row(entry, top) {
  const share = h("i", { class: "share", "aria-hidden": "true" });
  share.style.width = `${(100 * entry.uses) / top}%`;
  const uses = h("span", { class: "uses", title: plural(entry.uses, "use") }, `${count(entry.uses)}×`);
  const origin = h("span", { class: `origin ${entry.origin}` }, ORIGINS[entry.origin] ?? "");
  return h("li", { "data-testid": "entry" }, share, chip(entry.parts), origin, uses);
}

/** Returns an entry as a tinted text whose parts are told apart. */
function chip(parts) {
  const length = Math.min(5, Math.max(2, parts.length));
  return h("span", { class: `chip l${length}` }, parts.map((part) => h("span", {}, visible(part))));
}

function drawFill() {
  const figures = app.conversation.path.findLast((message) => message.figures)?.figures;
  const share = bounded(figures?.entries / figures?.codebook_size);
  place.fill.style.width = percent(share).replace(" ", "");
  const used = `${count(entries.distinct)} used here`;
  place.count.textContent = figures ? `${count(figures.entries)} of ${count(figures.codebook_size)} entries · ${used}` : used;
}
