// Whether hypertokens are tinted.

import { on } from "./bus.js";
import { button } from "./dom.js";

let pressed = null;

/** Returns the button that switches the tint; the choice is kept in this browser. */
export function tintButton() {
  pressed = button("Tint hypertokens", { icon: "tint", caption: "Tint", "data-testid": "tint-toggle", onclick: toggleTint });
  apply(localStorage.getItem("tint") !== "off");
  on("state", () => apply(document.documentElement.classList.contains("tinted")));
  return pressed;
}

/** Switches the tint on or off. */
export function toggleTint() {
  const tinted = !document.documentElement.classList.contains("tinted");
  localStorage.setItem("tint", tinted ? "on" : "off");
  apply(tinted);
}

function apply(tinted) {
  document.documentElement.classList.toggle("tinted", tinted);
  pressed.setAttribute("aria-pressed", String(tinted));
}
