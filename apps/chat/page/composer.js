// The box for the next message, with its draft, and the button that sends or stops.

import { answer, stop } from "./answers.js";
import { emit, on } from "./bus.js";
import { follow } from "./chat.js";
import { button, byId, debounced, h } from "./dom.js";
import { app, patch } from "./model.js";
import { guarded } from "./tell.js";
import { grows, isSend } from "./typing.js";

let input = null;
let fit = null;
let owner = null; // the conversation whose draft stands in the box

/** Makes the composer. */
export function startComposer() {
  input = h("textarea", { id: "input", rows: "1", placeholder: "Message", "aria-label": "Message", "data-testid": "input", dir: "auto", autocomplete: "off" });
  const send = button("Send", { icon: "send", class: "send", "data-testid": "send", onclick: submit });
  const halt = button("Stop", { icon: "stop", class: "send stop", "data-testid": "stop", onclick: () => stop(app.conversation) });
  byId("composer").append(input, send, halt);
  byId("composer").addEventListener("submit", (event) => event.preventDefault());
  byId("composer").addEventListener("mousedown", (event) => event.target === byId("composer") && (event.preventDefault(), input.focus()));
  fit = grows(input);
  input.addEventListener("input", typed);
  input.addEventListener("keydown", pressed);
  addEventListener("pagehide", () => saveDraft.now());
  on("shown", shown);
  on("shown answering answered", buttons);
  on("send", (text) => sendText(text));
}

function pressed(event) {
  if (isSend(event)) {
    event.preventDefault();
    submit();
  }
}

function typed() {
  buttons();
  saveDraft(owner, input.value);
}

const saveDraft = debounced(keepDraft, 500);

function keepDraft(conversation, draft) {
  if (conversation.id !== null) return guarded(() => patch(conversation, { draft }));
  conversation.draft = draft;
  return keepHere(draft);
}

/** Keeps the draft of a new conversation in the browser, which has no room for a very long one. */
function keepHere(draft) {
  try {
    localStorage.setItem("draft:new", draft);
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    localStorage.removeItem("draft:new");
  }
}

function shown() {
  saveDraft.now();
  owner = app.conversation;
  input.value = owner.draft ?? "";
  fit();
  if (!matchMedia("(pointer: coarse)").matches) input.focus({ preventScroll: true });
}

function buttons() {
  const running = app.conversation.running;
  const form = byId("composer");
  form.classList.toggle("running", running);
  form.querySelector('[data-testid="send"]').hidden = running;
  form.querySelector('[data-testid="send"]').disabled = !input.value.trim();
  form.querySelector('[data-testid="stop"]').hidden = !running;
}

function submit() {
  const text = input.value.trim();
  if (!text || app.conversation.running) return;
  input.value = "";
  fit();
  typed();
  saveDraft.now();
  sendText(text);
}

function sendText(text) {
  const conversation = app.conversation;
  if (conversation.running) return;
  follow();
  emit("sending", conversation);
  guarded(async () => {
    let taken = false;
    try {
      taken = await answer(conversation, { parent: conversation.leaf, text });
    } finally {
      if (!taken) giveBack(conversation, text);
    }
  });
}

/** Puts a message that was refused back into the box, before what was typed meanwhile. */
function giveBack(conversation, text) {
  const bothNew = conversation.id === null && owner.id === null; // the one on the screen has taken its place
  const shownNow = conversation === owner || bothNew;
  const draft = [text, shownNow ? input.value : conversation.draft].filter(Boolean).join("\n\n");
  keepDraft(shownNow ? owner : conversation, draft);
  if (!shownNow) return;
  input.value = draft;
  fit();
  buttons();
}

/** Puts the cursor into the box. */
export function focusInput() {
  input.focus();
}

/** Whether the box is empty. */
export function isEmpty() {
  return input.value === "";
}
