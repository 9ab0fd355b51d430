// Ways through the page: which conversation the address names, and going to another one.

import { emit } from "./bus.js";
import { byId } from "./dom.js";
import { app, fetchConversation, show } from "./model.js";
import { guarded } from "./tell.js";

/** Opens the conversation that the address names, or a new one. */
export function startWays() {
  addEventListener("hashchange", () => guarded(openNamed));
  byId("scrim").addEventListener("click", () => drawer(false));
  return openNamed();
}

async function openNamed() {
  const id = /^#\/c\/(.+)$/.exec(location.hash)?.[1];
  if (!id) return openNew();
  if (String(app.conversation?.id) === decodeURIComponent(id)) return undefined;
  try {
    await openConversation(decodeURIComponent(id));
  } catch (error) {
    if (error.status !== 404) throw error;
    openNew(); // it was deleted, perhaps in another tab
  }
  return undefined;
}

/** Shows a conversation. Raises ApiError if the server does not have it. */
export async function openConversation(id) {
  drawer(false);
  const conversation = await fetchConversation(id);
  leave();
  show(conversation);
  address(id);
}

/** Shows a new, empty conversation. */
export function openNew() {
  drawer(false);
  leave();
  show(null);
  address(null);
}

function leave() {
  emit("leaving");
}

/** Writes a conversation's id into the address, so that a reload comes back to it. */
export function address(id) {
  const hash = id === null ? "#/" : `#/c/${encodeURIComponent(id)}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

/** Opens or closes the sidebar where it is a drawer. */
export function drawer(open) {
  document.documentElement.classList.toggle("drawer", open);
  byId("scrim").hidden = !open;
}

/** Shows or hides the sidebar: as a drawer where the page is narrow. */
export function toggleSidebar() {
  const root = document.documentElement;
  if (matchMedia("(max-width: 760px)").matches) drawer(!root.classList.contains("drawer"));
  else localStorage.setItem("sidebar", root.classList.toggle("no-sidebar") ? "off" : "on");
}
