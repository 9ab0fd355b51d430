// Markdown to blocks, and a block to HTML. Pure: no DOM. The HTML is not safe yet: only `safe.js` may put it on the page.

import { Marked } from "../vendor/marked/marked.esm.js";
import { blockMath, inlineMath, mathStart } from "./math.js";

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

/** Returns text as HTML that shows it. */
export function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => ESCAPES[character]);
}

function mathHtml({ tex, display }) {
  const name = display ? "math display" : "math";
  return `<span class="${name}">${escaped(tex)}</span>`;
}

const inline = {
  name: "inlineMath",
  level: "inline",
  start: mathStart,
  tokenizer: (text) => withType("inlineMath", inlineMath(text)),
  renderer: mathHtml,
};

const block = {
  name: "blockMath",
  level: "block",
  tokenizer: (text) => withType("blockMath", blockMath(text)),
  renderer: (token) => `<p>${mathHtml(token)}</p>\n`,
};

function withType(type, found) {
  return found ? { type, ...found } : undefined;
}

const renderer = {
  // Markup in an answer is text: people ask about it, and it must never act.
  html: (token) => (token.block ? `<p>${escaped(token.text)}</p>\n` : escaped(token.text)),
  // A picture would be fetched from elsewhere, so it stands as a link.
  image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  // The page's own headings are h1 and h2.
  heading({ tokens, depth }) {
    const level = Math.min(6, depth + 2);
    return `<h${level} class="h${depth}">${this.parser.parseInline(tokens)}</h${level}>\n`;
  },
};

const marked = new Marked({ gfm: true, breaks: true, extensions: [inline, block], renderer });

/**
 * Returns the blocks of a Markdown text: [{type, raw, token}], whose raws concatenate to the text with its line ends as \n.
 * A carriage return becomes a space or a newline, so that lengths stay.
 */
export function blocksOf(text) {
  const tokens = marked.lexer(text.replace(/\r\n/g, " \n").replace(/\r/g, "\n"));
  return tokens.map((token) => ({ type: token.type, raw: token.raw, token }));
}

/** Returns the HTML of one block. */
export function htmlOf(block) {
  return marked.parser([block.token]);
}

const SPECIAL = /[\\`*_~[\]<&$\n\r\t@]|:\/\/|www\./;
const PROSE = /^ {0,3}[\p{L}"“‘„«'].{12,}/u;

/** Returns whether a paragraph's source shows as it stands, and so does what follows while `isLiteral` holds for that. */
export function isProse(block) {
  return block.type === "paragraph" && PROSE.test(block.raw) && isLiteral(block.raw);
}

/** Returns whether text that goes on inside a line shows as it stands, with no Markdown in it. */
export function isLiteral(text) {
  return !SPECIAL.test(text);
}
