// A menu that opens under a button, and dialogs that ask. Both work with the keyboard alone.

import { button, h, icon } from "./dom.js";

/** Returns a button that opens a menu. `items()` returns [{label, icon, run, testid, danger}], null for a line. */
export function menuButton(label, items, attributes = {}) {
  const opener = button(label, { icon: "more", "aria-haspopup": "menu", "aria-expanded": "false", ...attributes });
  opener.addEventListener("click", (event) => {
    event.preventDefault();
    event.stopPropagation();
    open(opener, items());
  });
  return opener;
}

function open(opener, items) {
  const menu = h("div", { class: "menu", role: "menu", "data-testid": "menu" });
  const close = (back = true) => {
    menu.remove();
    opener.setAttribute("aria-expanded", "false");
    document.removeEventListener("pointerdown", outside, true);
    removeEventListener("blur", away);
    if (back) opener.focus();
  };
  const outside = (event) => !menu.contains(event.target) && close(false);
  const away = () => close(false);
  for (const item of items) menu.append(item ? itemOf(item, close) : h("hr", {}));
  menu.addEventListener("keydown", (event) => keys(event, menu, close));
  document.body.append(menu);
  place(menu, opener);
  opener.setAttribute("aria-expanded", "true");
  document.addEventListener("pointerdown", outside, true);
  addEventListener("blur", away);
  menu.querySelector("button").focus();
}

function itemOf({ label, icon: drawn, run, testid, danger }, close) {
  const chosen = () => {
    close();
    run();
  };
  const attributes = { type: "button", role: "menuitem", class: danger ? "danger" : null, "data-testid": testid, onclick: chosen };
  return h("button", attributes, icon(drawn), h("span", {}, label));
}

function keys(event, menu, close) {
  const items = [...menu.querySelectorAll("button")];
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (event.key === "Escape" || event.key === "Tab") close();
  else if (to !== undefined) items[(to + items.length) % items.length].focus();
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function place(menu, opener) {
  const at = opener.getBoundingClientRect();
  menu.style.left = "0"; // measured where it has room
  const { offsetWidth: width, offsetHeight: height } = menu;
  const below = at.bottom + 4 + height < innerHeight;
  menu.style.left = `${Math.max(8, Math.min(at.right - width, innerWidth - width - 8))}px`;
  menu.style.top = `${below ? at.bottom + 4 : Math.max(8, at.top - height - 4)}px`;
}

/** Asks for a decision. Returns a promise of whether `yes` was chosen. */
export function confirmed(question, detail, yes) {
  return new Promise((resolve) => {
    const cancel = button("Cancel", { "data-testid": "dialog-cancel", onclick: () => dialog.close("no") });
    const agree = button(yes, { class: "primary danger", "data-testid": "dialog-confirm", onclick: () => dialog.close("yes") });
    const dialog = show(h("h2", { id: "dialog-title" }, question), h("p", {}, detail), h("div", { class: "row" }, cancel, agree));
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"));
    cancel.focus();
  });
}

/** Asks for a line of text; `known` are offered. Returns a promise of it, null if none was given. */
export function asked(question, detail, yes, known = []) {
  return new Promise((resolve) => {
    const list = known.length ? h("datalist", { id: "dialog-known" }, known.map((value) => h("option", { value }))) : null;
    const input = h("input", { type: "text", list: list && "dialog-known", maxlength: "1000", class: "field", "aria-labelledby": "dialog-title", "data-testid": "dialog-input", autocomplete: "off", spellcheck: "false" });
    const cancel = button("Cancel", { "data-testid": "dialog-cancel", onclick: () => dialog.close("no") });
    const agree = button(yes, { class: "primary", "data-testid": "dialog-confirm", onclick: () => dialog.close("yes") });
    input.addEventListener("keydown", (event) => event.key === "Enter" && !event.isComposing && dialog.close("yes"));
    const dialog = show(h("h2", { id: "dialog-title" }, question), h("p", {}, detail), input, list, h("div", { class: "row" }, cancel, agree));
    dialog.addEventListener("close", () => resolve((dialog.returnValue === "yes" && input.value.trim()) || null));
    input.focus();
  });
}

/** Shows a dialog with this content; its first heading has the id dialog-title. Escape and a click outside close it. */
export function show(...content) {
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "dialog-title", "data-testid": "dialog" }, h("div", { class: "inside" }, ...content));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close("no"));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
