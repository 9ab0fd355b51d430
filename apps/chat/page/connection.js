// When the server is gone: says so, waits for it, and catches up.

import * as api from "./api.js";
import { emit, on } from "./bus.js";
import { app, fetchConversation, patch, refreshState, show } from "./model.js";
import { banner, say, toast } from "./tell.js";

const EVERY_MS = 2000; // between two looks

let timer = null;
let cutOff = false; // whether the server went in the middle of an answer; requests that fail later do not hide that

/** Starts to watch for a lost server. */
export function startConnection() {
  on("lost", ({ midway, status }) => (status === 401 ? lockedOut() : lost(midway)));
  on("problem", ({ message }) => banner(message, { until: "shown taken" }));
  on("note", (message) => banner(message));
  addEventListener("hashchange", () => api.takeKey() && unlocked());
  addEventListener("storage", ({ key }) => key === "key" && unlocked());
}

/** Says that the page may not come in, and what to do. */
export function lockedOut() {
  clearTimeout(timer);
  banner("This page has no valid key. Open the address that mlx_zip app printed when it started.", { closes: false, until: "back" });
}

/** Goes on with the key of an address that was opened, in this tab or in another one. */
function unlocked() {
  if (app.state) look();
  else location.reload(); // nothing was shown yet
}

function lost(midway) {
  cutOff ||= midway;
  const what = cutOff
    ? "The server stopped in the middle of the answer. What had arrived is kept."
    : "The server does not answer.";
  banner(`${what} Looking for it…`, { actions: [{ label: "Try again", run: look, testid: "banner-retry" }], until: "back" });
  say(what);
  clearTimeout(timer);
  timer = setTimeout(look, EVERY_MS);
}

async function look() {
  clearTimeout(timer);
  if (!(await api.alive())) {
    timer = setTimeout(look, EVERY_MS);
    return;
  }
  try {
    await refreshState();
    await catchUp();
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    if (error.status === 401) return lockedOut();
    return lost(false);
  }
  cutOff = false;
  emit("back");
  toast("The server is back");
}

/** Takes over the server's conversation, but no answer that is shorter than what the page has of it. */
async function catchUp() {
  const { conversation } = app;
  emit("saved", null);
  if (conversation.id === null || conversation.running) return;
  const had = new Map(conversation.messages);
  const { draft } = conversation; // newer than the server's: what was typed while it was gone
  const fresh = await fetchConversation(conversation.id).catch((error) => {
    if (error.status === 404) return null; // it was never written: what the page has is all there is
    throw error;
  });
  if (!fresh) return;
  for (const [id, message] of had) {
    const theirs = fresh.messages.get(id);
    if (theirs && message.text.length > theirs.text.length && message.text.startsWith(theirs.text)) Object.assign(theirs, { text: message.text, tokens: message.tokens });
  }
  if (fresh.draft !== draft) await patch(fresh, { draft });
  if (app.conversation === conversation) show(fresh);
}
