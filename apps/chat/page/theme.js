// Light, dark, or as the system has it.

import { icon, button } from "./dom.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const NAMES = { auto: "as the system", light: "light", dark: "dark" };
const ICONS = { auto: "auto", light: "sun", dark: "moon" };

/** Returns the button that switches between the three. */
export function themeButton() {
  const pressed = button("Theme", { icon: "auto", "data-testid": "theme", onclick: () => choose(NEXT[wanted()]) });
  const draw = () => {
    const label = `Theme: ${NAMES[wanted()]}`;
    pressed.replaceChildren(icon(ICONS[wanted()]));
    pressed.setAttribute("aria-label", label);
    pressed.title = label;
  };
  const choose = (name) => {
    localStorage.setItem("theme", name);
    dispatchEvent(new CustomEvent("mlx_zip:theme", { detail: name }));
    draw();
  };
  draw();
  return pressed;
}

function wanted() {
  return document.documentElement.dataset.wanted ?? "auto";
}
