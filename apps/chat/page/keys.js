// Keyboard shortcuts, and the list of them.

import { act } from "./chat.js";
import { stop } from "./answers.js";
import { on } from "./bus.js";
import { focusInput, isEmpty } from "./composer.js";
import { button, h } from "./dom.js";
import { show } from "./menu.js";
import { app } from "./model.js";
import { togglePanel } from "./panel.js";
import { openRace, raceIsOpen, closeRace } from "./race.js";
import { focusSearch, neighbourOf } from "./sidebar.js";
import { guarded } from "./tell.js";
import { toggleTint } from "./tint.js";
import { drawer, openConversation, openNew, toggleSidebar } from "./ways.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const MOD = MAC ? "⌘" : "Ctrl";

// name of the key with its modifiers -> [what it does, run]
const SHORTCUTS = {
  "mod+k": ["Search conversations", findConversation],
  "mod+shift+o": ["New conversation", openNew],
  "mod+b": ["Show or hide the sidebar", toggleSidebar],
  "mod+i": ["Show or hide the vocabulary", () => togglePanel("vocabulary")],
  "mod+,": ["Show or hide the settings", () => togglePanel("settings")],
  "mod+shift+h": ["Tint the hypertokens", toggleTint],
  "mod+shift+e": ["Answer again", () => act("regenerate")],
  "mod+shift+y": ["Race", () => (raceIsOpen() ? closeRace() : openRace())],
  "alt+arrowup": ["Conversation above", () => step(-1)],
  "alt+arrowdown": ["Conversation below", () => step(1)],
};
const OTHERS = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["Escape", "Stop the answer; close what is open"],
  ["↑", "Edit the last message, from an empty box"],
  ["/", "Go to the message box"],
  ["?", "This list"],
];

/** Starts to listen for shortcuts, and for "shortcuts": whoever wants to see their list. */
export function startKeys() {
  on("shortcuts", help);
  document.addEventListener("keydown", pressed);
}

function findConversation() {
  document.documentElement.classList.remove("no-sidebar");
  if (matchMedia("(max-width: 760px)").matches) drawer(true);
  focusSearch();
}

function step(by) {
  const id = neighbourOf(app.conversation.id, by);
  if (id !== null) guarded(() => openConversation(id));
}

function nameOf(event) {
  const mod = MAC ? event.metaKey : event.ctrlKey;
  return [mod && "mod", event.altKey && "alt", event.shiftKey && "shift", event.key.toLowerCase()].filter(Boolean).join("+");
}

function pressed(event) {
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
  const shortcut = SHORTCUTS[nameOf(event)];
  const typing = event.target.matches?.("input, textarea, select");
  if (shortcut) shortcut[1]();
  else if (event.key === "Escape") escape();
  else if (event.key === "ArrowUp" && event.target.id === "input" && isEmpty()) act("edit");
  else if (!typing && event.key === "?") help();
  else if (!typing && event.key === "/") focusInput();
  else return;
  event.preventDefault();
}

function escape() {
  if (document.documentElement.classList.contains("drawer")) drawer(false);
  else if (raceIsOpen()) closeRace();
  else if (app.conversation.running) stop(app.conversation);
}

/** Shows the list of shortcuts. */
function help() {
  const line = (keys, what) => [h("dt", {}, keys.map((key) => h("kbd", {}, key))), h("dd", {}, what)];
  const own = Object.entries(SHORTCUTS).flatMap(([name, [what]]) => line(name.split("+").map(keyLabel), what));
  const others = OTHERS.flatMap(([keys, what]) => line(keys.split(" "), what));
  const done = h("div", { class: "row" }, button("Done", { class: "primary", onclick: () => dialog.close() }));
  const dialog = show(h("h2", { id: "dialog-title" }, "Keyboard shortcuts"), h("dl", { class: "keys" }, ...own, ...others), done);
  dialog.querySelector("button").focus();
}

function keyLabel(name) {
  const labels = { mod: MOD, shift: MAC ? "⇧" : "Shift", alt: MAC ? "⌥" : "Alt", arrowup: "↑", arrowdown: "↓" };
  return labels[name] ?? name.toUpperCase();
}
