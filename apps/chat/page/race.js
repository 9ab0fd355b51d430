// The race: one request, answered by the model and then by its base, side by side, each with its own clock.

import * as api from "./api.js";
import { emit } from "./bus.js";
import { button, byId, h } from "./dom.js";
import { Lane, verdict } from "./lane.js";
import { app } from "./model.js";
import { guarded, say } from "./tell.js";
import { grows, isSend } from "./typing.js";

const DEFAULT = "Tell me a story about a boy and his boat.";
const place = {};
let lanes = null;
let running = null; // AbortController
let origin = null; // {conversation, leaf, text}: a message of a conversation whose words stand in the box

/** Makes the race's view, which is hidden until it is opened. */
export function startRace() {
  place.prompt = h("textarea", { class: "field", rows: "1", "aria-label": "Request", "data-testid": "race-prompt", dir: "auto" });
  place.base = h("select", { class: "picker", "aria-label": "Against", "data-testid": "race-base" });
  place.base.addEventListener("change", describe);
  place.start = button("Start", { class: "primary", "data-testid": "race-start", onclick: () => guarded(run) });
  place.stop = button("Stop", { hidden: true, "data-testid": "race-stop", onclick: () => running?.abort() });
  place.verdict = h("p", { class: "verdict", "data-testid": "race-verdict", "aria-live": "polite" });
  place.fit = grows(place.prompt);
  place.prompt.addEventListener("keydown", (event) => {
    if (!isSend(event)) return;
    event.preventDefault();
    guarded(run);
  });
  const close = button("Close", { icon: "close", "data-testid": "race-close", onclick: closeRace });
  lanes = { zip: new Lane("zip", "With hypertokens"), base: new Lane("base", "Base") };
  byId("race").append(
    h("header", {}, h("h2", {}, "Race"), h("p", { class: "quiet" }, "The same request, one after the other: two at once would share one machine and slow each other down."), close),
    h("div", { class: "start" }, place.prompt, h("label", {}, h("span", {}, "against"), place.base), place.start, place.stop),
    h("div", { class: "lanes" }, lanes.zip.element, lanes.base.element),
    place.verdict,
  );
}

/** Shows the race; the request is the given message, or the last one of the user's on the screen. */
export function openRace(message = app.conversation.path.findLast(({ role }) => role === "user")) {
  const conversation = app.conversation;
  if (!running) {
    origin = message ? { conversation: conversation.id, leaf: message.id, text: message.text } : null;
    place.prompt.value = message?.text ?? DEFAULT;
    choices();
  }
  byId("chat").hidden = true;
  byId("race").hidden = false;
  place.fit();
  place.prompt.focus();
  emit("race", true);
}

/** Shows the conversation again. A race that runs goes on. */
export function closeRace() {
  byId("race").hidden = true;
  byId("chat").hidden = false;
  emit("race", false);
  byId("input").focus();
}

/** Whether the race is on the screen. */
export function raceIsOpen() {
  return !byId("race").hidden;
}

function choices() {
  const kept = place.base.value;
  const bases = app.state?.race ?? [];
  place.base.replaceChildren(...bases.map(({ name, label }) => h("option", { value: name }, label)));
  if (bases.some(({ name }) => name === kept)) place.base.value = kept;
  place.start.disabled = !bases.length;
  describe();
  if (!bases.length) place.verdict.textContent = "There is no base to race against.";
}

/** Says what the lanes will hold, before the first race: they keep their height when it begins. */
function describe() {
  const base = app.state?.race?.find(({ name }) => name === place.base.value);
  if (!base || lanes.base.element.dataset.state !== "idle") return;
  lanes.zip.describe(`${app.state.model}, with hypertokens`, "");
  lanes.base.describe(base.label, base.quality);
}

function requestBody() {
  const text = place.prompt.value.trim();
  const base = place.base.value;
  const { sampling } = app.conversation;
  const same = origin && origin.text.trim() === text && origin.conversation !== null;
  return same ? { conversation: origin.conversation, leaf: origin.leaf, base, sampling } : { messages: [{ role: "user", content: text }], base, sampling };
}

async function run() {
  if (running || !place.prompt.value.trim() || !place.base.value) return;
  running = new AbortController();
  const body = requestBody();
  const known = app.state.race.find(({ name }) => name === body.base);
  lanes.zip.reset("running", app.state.model, "");
  lanes.base.reset("waiting", known.label, known.quality);
  switchButtons(true);
  place.verdict.textContent = "";
  say("The race has begun: the model with hypertokens goes first.");
  try {
    for await (const frame of api.stream("race", body, running.signal)) take(frame);
    if (running.finished !== true) broken("The server went away during the race.");
  } catch (error) {
    if (error.name !== "AbortError") {
      broken(error.message);
      throw error;
    }
    broken("Stopped.");
  } finally {
    running = null;
    switchButtons(false);
  }
}

function broken(reason) {
  for (const lane of Object.values(lanes)) lane.end("stopped");
  place.verdict.textContent = reason;
}

function switchButtons(on) {
  place.start.hidden = on;
  place.stop.hidden = !on;
  place.base.disabled = on;
  place.prompt.readOnly = on;
}

function take(frame) {
  const lane = lanes[frame.lane];
  if (frame.type === "lane") lane.start(frame);
  else if (frame.type === "done" && frame.lanes) finished(frame.lanes);
  else if (frame.type === "error") throw new api.ApiError(frame.message, 500);
  else lane?.take(frame);
}

function finished(figures) {
  running.finished = true;
  for (const [name, lane] of Object.entries(lanes)) lane.finish(figures[name]);
  const [outcome, rest] = verdict(figures.zip, figures.base);
  place.verdict.replaceChildren(h("b", {}, outcome), ` ${rest}`);
}
