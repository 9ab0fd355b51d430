// Tells people what happened: a banner that stays, a toast that goes, and what screen readers say.

import { ApiError } from "./api.js";
import { emit, on } from "./bus.js";
import { button, byId, h, icon } from "./dom.js";

let hiding = null;
let leaves = []; // names of the events that take the banner away

/** Lets screen readers say a text when they are free. */
export function say(text) {
  byId("live-region").textContent = text;
}

/** Shows a short text for three seconds. */
export function toast(text) {
  const place = byId("toast");
  place.textContent = text;
  place.classList.add("on");
  clearTimeout(hiding);
  hiding = setTimeout(() => place.classList.remove("on"), 3000);
}

/** Starts to take banners away when what they report is over. */
export function startBanner() {
  for (const name of ["shown", "taken", "back"]) on(name, () => leaves.includes(name) && hideBanner());
}

/**
 * Shows a text that stays, with actions [{label, run}] as buttons, until it is closed or an event happens. kind: "problem" or
 * "news". until: names of the events, separated by spaces: a conversation is shown, a message is taken, the server is back.
 */
export function banner(text, { actions = [], kind = "problem", closes = true, until = "" } = {}) {
  const place = byId("banner");
  leaves = until.split(" ");
  const made = actions.map(({ label, run, testid }) => button(label, { onclick: run, "data-testid": testid }));
  const close = closes && button("Close", { icon: "close", class: "quiet", onclick: hideBanner });
  place.dataset.kind = kind;
  place.replaceChildren(icon("warning"), h("p", {}, text), ...made, ...(close ? [close] : []));
  place.hidden = false;
  document.documentElement.style.setProperty("--banner", `${place.offsetHeight}px`);
}

/** Takes the banner away. */
export function hideBanner() {
  leaves = [];
  byId("banner").hidden = true;
  document.documentElement.style.removeProperty("--banner");
  byId("banner").replaceChildren();
}

/** Runs what the user asked for. A request that fails is shown; any other error is a fault of the page and is thrown. */
export async function guarded(run) {
  try {
    return await run();
  } catch (error) {
    if (error.name === "NotAllowedError") return banner("The browser does not let the page use the clipboard.", { until: "shown taken" });
    if (!(error instanceof ApiError)) throw error;
    if (error.unreachable || error.status === 401) emit("lost", { midway: false, status: error.status });
    else banner(error.message, { until: "shown taken" });
    return undefined;
  }
}
