// HTML to DOM nodes, through the sanitizer. The only module that turns a string into elements.

import "../vendor/dompurify/purify.min.js";
import { button, h, icon } from "./dom.js";

const purifier = globalThis.DOMPurify;
const TAGS = (
  "a p br hr h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td span"
).split(" ");
const BLOCKS = "p, ul, ol, h3, h4, h5, h6, blockquote, td, th";
const SETTINGS = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"],
  ADD_URI_SAFE_ATTR: ["start", "align"], // no addresses: the rule below is not for them
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Returns the nodes of sanitized HTML, with code, tables, links and formulas made ready for the page. */
export function nodesOf(html) {
  const fragment = purifier.sanitize(html, SETTINGS);
  fragment.querySelectorAll(BLOCKS).forEach((block) => (block.dir = "auto")); // each runs in the direction of its words
  fragment.querySelectorAll("a").forEach(openOutside);
  fragment.querySelectorAll("table").forEach(scrollable);
  fragment.querySelectorAll("pre").forEach(codeBlock);
  fragment.querySelectorAll("span.math").forEach(formula);
  return fragment;
}

function openOutside(link) {
  if (!link.getAttribute("href")) return;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
}

function scrollable(table) {
  const around = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
  table.replaceWith(around);
  around.append(table);
}

/** Gives a code block its head with the language and a button that copies. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const copy = button("Copy code", { icon: "copy", class: "copy-code", "data-testid": "copy-code" });
  const around = h("div", { class: "code", "data-language": language });
  pre.replaceWith(around);
  pre.tabIndex = 0;
  around.append(h("div", { class: "code-head" }, h("span", {}, language || "text"), copy), pre);
}

// ---- formulas and colours: libraries that are fetched when they are first needed

let katex = null;
let highlighter = null;
let loading = {};

function once(name, load) {
  loading[name] ??= load();
  return loading[name];
}

/** Fetches the library for formulas. Returns a promise. */
function loadMath() {
  return once("katex", async () => {
    document.head.append(h("link", { rel: "stylesheet", href: new URL("../vendor/katex/katex.min.css", import.meta.url).href }));
    await import("../vendor/katex/katex.min.js");
    katex = globalThis.katex;
  });
}

/** Fetches the library that colours code. Returns a promise. */
function loadHighlighter() {
  return once("highlighter", async () => {
    highlighter = (await import("../vendor/highlight/highlight.min.js")).default;
  });
}

/** Returns what these nodes need and is not fetched yet: a promise, or null for nothing. */
export function missing(nodes) {
  const has = (selector) => nodes.some((node) => node.matches?.(selector) || node.querySelector?.(selector));
  const wanted = [];
  if (!katex && has(".math")) wanted.push(loadMath());
  if (!highlighter && has('.code:not([data-language=""])')) wanted.push(loadHighlighter());
  return wanted.length ? Promise.all(wanted) : null;
}

function formula(span) {
  if (!katex) return;
  const tex = span.textContent;
  try {
    katex.render(tex, span, { displayMode: span.classList.contains("display"), throwOnError: true, trust: false, maxExpand: 200 });
  } catch (error) {
    if (!(error instanceof katex.ParseError) && !(error instanceof RangeError)) throw error;
    span.replaceChildren(h("code", { title: error.message }, tex));
  }
}

/** Colours the code blocks among nodes whose language is known; at most 100,000 characters each. */
export function colour(nodes) {
  if (!highlighter) return;
  for (const node of nodes) {
    for (const around of node.matches?.(".code") ? [node] : (node.querySelectorAll?.(".code") ?? [])) colourOne(around);
  }
}

function colourOne(around) {
  const code = around.querySelector("code");
  const language = around.dataset.language;
  if (!code || !highlighter.getLanguage(language) || code.textContent.length > 100000) return;
  const { value } = highlighter.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(purifier.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
}

/** Copies the code of the block that a copy button stands in, and says so on the button. */
export async function copyCode(pressed) {
  const code = pressed.closest(".code").querySelector("code");
  await navigator.clipboard.writeText(code.textContent);
  pressed.replaceChildren(icon("check"));
  setTimeout(() => pressed.replaceChildren(icon("copy")), 1500);
}
