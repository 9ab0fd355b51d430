// What a hypertoken is made of, and whether a token was drafted: shown when the pointer rests on one, or when the keyboard steps through them.

import { byId, h } from "./dom.js";
import { isMarked, lengthClass, visible, whereLearned } from "./entries.js";
import { plural } from "./figures.js";

let at = null; // the span whose parts are shown
let timer = null;
let messageOf = null; // see startPopover

/** Starts to listen for the pointer and the keyboard. find: returns the message that an element belongs to. */
export function startPopover(find) {
  messageOf = find;
  const messages = byId("messages");
  messages.addEventListener("pointerover", (event) => {
    if (!document.documentElement.classList.contains("tinted")) return;
    const token = event.target.closest?.(".tok");
    clearTimeout(timer);
    if (!token) timer = setTimeout(left, 120);
    else if (token !== at) timer = setTimeout(() => show(token), at ? 40 : 180);
  });
  messages.addEventListener("pointerleave", () => {
    clearTimeout(timer);
    timer = setTimeout(left, 120);
  });
  messages.addEventListener("click", (event) => event.target.closest(".tok") && show(event.target.closest(".tok")));
  messages.addEventListener("keydown", step);
  messages.addEventListener("focusin", (event) => event.target.matches(".tok") && show(event.target));
  messages.addEventListener("focusout", (event) => event.target.matches(".tok") && (release(event.target), hide()));
  byId("scroller").addEventListener("scroll", scrolled, { passive: true });
}

/** The pointer is on no hypertoken any more: perhaps the page has scrolled away under it, to the one with the focus. */
function left() {
  if (at !== document.activeElement) hide();
}

/** A hypertoken with the focus may have scrolled into view just now: its popover goes along. */
function scrolled() {
  if (at !== null && at === document.activeElement) place(byId("popover"), at);
  else hide();
}

/** Puts the keyboard on the first hypertoken of a message; arrow keys go on from there. */
export function inspect(message) {
  document.documentElement.classList.add("tinted");
  const first = message.querySelector(".tok");
  if (first) focus(first);
}

// A span can only hold the focus while it is a stop; thousands of stops would be in everybody's way.
function focus(token) {
  token.tabIndex = -1;
  token.setAttribute("role", "button");
  token.setAttribute("aria-describedby", "popover");
  token.focus();
}

function release(token) {
  for (const name of ["tabindex", "role", "aria-describedby"]) token.removeAttribute(name);
}

function step(event) {
  if (!event.target.matches(".tok")) return;
  const message = event.target.closest(".message");
  const all = [...message.querySelectorAll(".tok")];
  const here = all.indexOf(event.target);
  const to = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: all.length - 1 }[event.key];
  if (event.key === "Escape") message.querySelector('[data-testid="inspect"]')?.focus();
  else if (to !== undefined) all[to] && focus(all[to]);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function show(span) {
  const token = messageOf(span)?.tokens?.[Number(span.dataset.t)];
  if (!isMarked(token) || !span.isConnected) return;
  if (at) at.classList.remove("on");
  at = span;
  span.classList.add("on");
  const parts = (token.p ?? [token.t]).map((part) => h("code", {}, visible(part)));
  const facts = [token.p && whereLearned(token), token.d && "Drafted: proposed ahead and accepted, so it took no pass of its own"];
  const popover = byId("popover");
  popover.replaceChildren(
    h("p", { class: `parts ${lengthClass(token)}` }, ...parts),
    h("p", { class: "strong" }, `${plural(parts.length, "base token")}, one step`),
    ...facts.filter(Boolean).map((fact) => h("p", {}, fact)),
  );
  popover.hidden = false;
  place(popover, span);
}

function place(popover, span) {
  const line = span.getClientRects()[0] ?? span.getBoundingClientRect();
  popover.style.left = "0"; // measured where it has room
  const { offsetWidth: width, offsetHeight: height } = popover;
  const above = line.top - height - 8 > 8;
  popover.style.left = `${Math.max(8, Math.min(line.left + line.width / 2 - width / 2, innerWidth - width - 8))}px`;
  popover.style.top = `${above ? line.top - height - 8 : line.bottom + 8}px`;
}

function hide() {
  clearTimeout(timer);
  at?.classList.remove("on");
  at = null;
  byId("popover").hidden = true;
}
