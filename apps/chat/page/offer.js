// The line above the message box that offers the pack with which a prompt is read in fewer steps.

import * as api from "./api.js";
import { on } from "./bus.js";
import { button, byId, debounced, h } from "./dom.js";
import { count } from "./figures.js";
import { app, patch } from "./model.js";
import { guarded, toast } from "./tell.js";

const LEAST = 80; // characters of a prompt from which on a pack can matter
const SHARE = 0.9; // of its steps that a prompt may need at most with a pack that is offered

let asked = 0; // number of the newest question

/** Starts to look at what is written into the message box. */
export function startOffer() {
  const input = byId("input");
  const look = debounced(() => guarded(() => ask(input.value)), 400);
  input.addEventListener("input", look);
  on("shown sending", () => draw(null));
  on("shown", look);
}

async function ask(text) {
  const mine = ++asked;
  const conversation = app.conversation;
  const usable = conversation.modelName === app.state?.model && app.state.packs?.some(({ reason }) => !reason);
  if (!usable || text.trim().length < LEAST) return draw(null);
  const fit = await api.call("POST", "fit", { text, packs: conversation.packs });
  if (mine === asked && conversation === app.conversation) draw(fit.best && fit.best.ids <= SHARE * fit.ids ? fit : null);
  return undefined;
}

function draw(fit) {
  const place = byId("offer");
  place.hidden = fit === null;
  if (fit === null) return place.replaceChildren();
  const { name, ids } = fit.best;
  const words = `With the pack “${name}” this prompt is read in ${count(ids)} steps, not in ${count(fit.ids)}.`;
  return place.replaceChildren(h("p", {}, words), button("Use it", { "data-testid": "offer-use", onclick: () => guarded(() => use(name)) }));
}

async function use(name) {
  draw(null);
  byId("input").focus();
  await patch(app.conversation, { packs: [name] });
  toast(`This conversation begins with ${name}`);
}
