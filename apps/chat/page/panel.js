// The panel on the right: the vocabulary, or the settings.

import { emit } from "./bus.js";
import { button, byId, h } from "./dom.js";
import { settings } from "./settings.js";
import { vocabulary } from "./vocabulary.js";

const TABS = { vocabulary: ["Vocabulary", vocabulary], settings: ["Settings", settings] };

let current = null;

/** Makes the panel; it is shown if it was when the page was left, and there is room. */
export function startPanel() {
  const close = button("Close", { icon: "close", "data-testid": "panel-close", onclick: () => showPanel(null) });
  const tabs = Object.entries(TABS).map(([name, [label]]) => tab(name, label));
  const head = h("div", { class: "panel-head" }, h("div", { class: "tabs", role: "tablist", "aria-label": "Panel", onkeydown: arrows }, tabs), close);
  const bodies = Object.entries(TABS).map(([name, [, make]]) =>
    h("div", { id: `panel-${name}`, class: "panel-body", role: "tabpanel", "aria-labelledby": `tab-${name}`, tabindex: "0", hidden: true }, ...make()),
  );
  byId("panel").append(head, ...bodies);
  byId("panel").setAttribute("aria-label", "Vocabulary and settings");
  const kept = localStorage.getItem("panel");
  if (kept && innerWidth > 1100) showPanel(kept);
}

function tab(name, label) {
  return h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, "data-testid": `tab-${name}`, onclick: () => showPanel(name) }, label);
}

function arrows(event) {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const names = Object.keys(TABS);
  showPanel(names[1 - names.indexOf(current)]);
  byId(`tab-${current}`).focus();
}

/** Shows a tab of the panel; null hides the panel. */
export function showPanel(name) {
  const had = byId("panel").contains(document.activeElement);
  current = Object.hasOwn(TABS, name ?? "") ? name : null;
  byId("panel").hidden = current === null;
  for (const other of Object.keys(TABS)) {
    byId(`panel-${other}`).hidden = other !== current;
    byId(`tab-${other}`).setAttribute("aria-selected", String(other === current));
    byId(`tab-${other}`).tabIndex = other === current ? 0 : -1;
  }
  localStorage.setItem("panel", current ?? "");
  if (had && current === null) byId("input").focus();
  emit("panel", current);
}

/** Shows a tab, or hides the panel if that tab is shown. */
export function togglePanel(name) {
  showPanel(current === name ? null : name);
}

/** The tab that is shown, null for none. */
export function shownPanel() {
  return current;
}
