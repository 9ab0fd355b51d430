// Small helpers to make elements. Text goes in as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

/** Returns a new element. An attribute whose name begins with `on` is a listener; null, undefined and false are left out. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Drawn on a grid of 20 by 20 with a line of 1.5.
const ICONS = {
  plus: "M10 4v12M4 10h12",
  search: "M9 3.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11M13 13l4 4",
  sidebar: "M3 5.5A1.5 1.5 0 0 1 4.5 4h11A1.5 1.5 0 0 1 17 5.5v9a1.5 1.5 0 0 1-1.5 1.5h-11A1.5 1.5 0 0 1 3 14.5zM8 4v12",
  panel: "M3 5.5A1.5 1.5 0 0 1 4.5 4h11A1.5 1.5 0 0 1 17 5.5v9a1.5 1.5 0 0 1-1.5 1.5h-11A1.5 1.5 0 0 1 3 14.5zM12 4v12",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  copy: "M7.5 7.5h7a1 1 0 0 1 1 1v7a1 1 0 0 1-1 1h-7a1 1 0 0 1-1-1v-7a1 1 0 0 1 1-1zM4.5 12.5h-.2a.8.8 0 0 1-.8-.8V4.3a.8.8 0 0 1 .8-.8h7.4a.8.8 0 0 1 .8.8v.2",
  check: "M4.5 10.5l3.5 3.5 7.5-8",
  redo: "M15.5 8A6 6 0 1 0 16 11M15.8 4v4h-4",
  edit: "M12.8 4.2l3 3L7.5 15.5l-3.7.7.7-3.7zM11 6l3 3",
  play: "M6.5 4.5v11l9-5.5z",
  stop: "M6 6h8v8H6z",
  send: "M10 16V4.5M5 9.3l5-5 5 5",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  down: "M10 4v11.5M5 10.7l5 5 5-5",
  close: "M5 5l10 10M15 5L5 15",
  trash: "M4 6h12M8 6V4.5a1 1 0 0 1 1-1h2a1 1 0 0 1 1 1V6M5.5 6l.7 9.5a1 1 0 0 0 1 1h5.6a1 1 0 0 0 1-1L14.5 6M8.5 9v4.5M11.5 9v4.5",
  sliders: "M4 6h6M14 6h2M4 14h2M10 14h6M12 4.2v3.6M8 12.2v3.6",
  flag: "M5 17V3.5M5 4h9.5l-2 3 2 3H5",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M15.7 4.3l-1.1 1.1M5.4 14.6l-1.1 1.1",
  moon: "M16 11.7A6.5 6.5 0 0 1 8.3 4a6.5 6.5 0 1 0 7.7 7.7z",
  auto: "M10 3.5a6.5 6.5 0 1 0 0 13zM10 3.5a6.5 6.5 0 0 1 0 13",
  tint: "M3.5 6.5h5v3h-5zM10.5 6.5h6v3h-6zM3.5 11.5h7v3h-7zM12.5 11.5h4v3h-4z",
  keyboard: "M3 5.5h14v9H3zM6 8.5h.01M9 8.5h.01M12 8.5h.01M14.5 8.5h.01M6.5 11.8h7",
  upload: "M10 13V4M6.5 7.2L10 3.7l3.5 3.5M4 13.5v1.7a1 1 0 0 0 1 1h10a1 1 0 0 0 1-1v-1.7",
  download: "M10 4v9M6.5 9.8L10 13.3l3.5-3.5M4 13.5v1.7a1 1 0 0 0 1 1h10a1 1 0 0 0 1-1v-1.7",
  eye: "M2.5 10S5 5 10 5s7.5 5 7.5 5-2.5 5-7.5 5-7.5-5-7.5-5zM10 7.8a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4",
  pin: "M7.5 3.5h5l-.6 5 2.6 3H5.5l2.6-3zM10 11.5V17",
  folder: "M3 6a1.5 1.5 0 0 1 1.5-1.5h3l2 2h6A1.5 1.5 0 0 1 17 8v6a1.5 1.5 0 0 1-1.5 1.5h-11A1.5 1.5 0 0 1 3 14z",
  warning: "M10 3.5l7 12.5H3zM10 8.5v3.5M10 14h.01",
};

/** Returns an icon as an SVG element that screen readers pass over. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/**
 * Returns a button. options.icon: an icon with `label` as its name and tooltip; without: `label` is its text. options.caption:
 * a word of `label` that stands under the icon.
 */
export function button(label, { icon: drawn, text, caption, ...attributes } = {}) {
  const named = drawn && !text ? { "aria-label": label, title: label } : {};
  return h("button", { type: "button", ...named, ...attributes }, drawn && icon(drawn), caption && h("span", { class: "caption" }, caption), (text || !drawn) && h("span", {}, label));
}

/** Returns the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Calls `run` once, `wait_ms` after the last of several calls. `.now()` runs what is waiting at once. */
export function debounced(run, wait_ms) {
  let timer = null;
  let waiting = null;
  const fire = () => {
    const values = waiting;
    clearTimeout(timer);
    timer = waiting = null;
    return values ? run(...values) : undefined;
  };
  const call = (...values) => {
    waiting = values;
    clearTimeout(timer);
    timer = setTimeout(fire, wait_ms);
  };
  call.now = fire;
  return call;
}

/** Calls `draw` at most once per frame and once in `least_ms`, however often it is asked for. */
export function perFrame(draw, least_ms = 0) {
  let asked = false;
  let drawn = -Infinity;
  const frame = (now) => {
    if (now - drawn < least_ms) return requestAnimationFrame(frame);
    [asked, drawn] = [false, now];
    return draw();
  };
  return () => {
    if (!asked) requestAnimationFrame(frame);
    asked = true;
  };
}
