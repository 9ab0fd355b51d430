// The text of one answer on the page: Markdown, with its hypertokens tinted, growing while it streams.
//
// Blocks that are complete stay as they are; only the last one is drawn anew when text arrives. Prose, which shows as it
// stands, is only added to.

import { align, endsOf, runs } from "./align.js";
import { blocksOf, htmlOf, isLiteral, isProse } from "./blocks.js";
import { h } from "./dom.js";
import { isMarked, lengthClass } from "./entries.js";
import { colour, missing, nodesOf } from "./safe.js";

const SLICE_MS = 8; // of a frame that a long answer may take at once

export class Body {
  #text = ""; // what is shown
  #tokens = null; // tokens of the text, null: not known
  #ends = []; // end offset of each token in the text
  #settled = 0; // where the open block begins in the text
  #open = []; // nodes of the open block
  #drawing = null; // what `set` has not finished yet
  #prose = null; // element of the open block if text may simply be added to it

  constructor(element) {
    this.element = element;
  }

  get shown() {
    return this.#text;
  }

  /** Shows a text as it stands, without Markdown: cheap, for messages that are far away. `set` draws it properly. */
  plain(text) {
    this.#clear();
    this.element.classList.add("plain");
    this.element.textContent = text;
  }

  /** Draws a whole text; a long one takes several frames. What is shown before stays until then. */
  set(text, tokens) {
    this.#forget();
    this.#take(text, tokens);
    this.#drawing = { blocks: blocksOf(text), index: 0, offset: 0, holder: document.createDocumentFragment() };
    this.#slice(this.#drawing);
  }

  #slice(job) {
    if (this.#drawing !== job) return; // another text has come meanwhile
    const end = performance.now() + SLICE_MS;
    while (job.index < job.blocks.length && performance.now() < end) {
      const block = job.blocks[job.index++];
      const nodes = this.#draw(block, job.offset);
      job.holder.append(...nodes);
      if (nodes.length) [this.#open, this.#settled] = [nodes, job.offset];
      job.offset += block.raw.length;
    }
    if (job.index < job.blocks.length) return requestAnimationFrame(() => this.#slice(job));
    this.#drawing = null;
    this.element.classList.remove("plain");
    this.element.replaceChildren(job.holder);
  }

  /** Draws what has been added to a text that is shown already. */
  grow(text, tokens) {
    if (this.#drawing || this.element.classList.contains("plain")) this.#clear();
    const known = this.#text.length;
    if (text.length === known) return;
    this.#take(text, tokens);
    if (this.#prose && isLiteral(text.slice(known))) this.#add(known);
    else this.#redraw();
  }

  #clear() {
    this.element.classList.remove("plain");
    this.element.replaceChildren();
    this.#forget();
  }

  #forget() {
    this.#drawing = null;
    [this.#text, this.#tokens, this.#ends, this.#settled, this.#open, this.#prose] = ["", null, [], 0, [], null];
  }

  #take(text, tokens) {
    this.#text = text;
    this.#tokens = tokens;
    const done = this.#ends.length;
    if (!tokens) return;
    for (const end of endsOf(tokens.slice(done), done ? this.#ends[done - 1] : 0)) this.#ends.push(end);
  }

  #redraw() {
    for (const node of this.#open) node.remove();
    const blocks = blocksOf(this.#text.slice(this.#settled));
    const last = blocks.findLastIndex((block) => block.type !== "space");
    for (const [index, block] of blocks.entries()) {
      const nodes = this.#draw(block, this.#settled, index >= last);
      this.element.append(...nodes);
      if (index < last) this.#settled += block.raw.length;
      else if (index === last) this.#open = nodes;
    }
    if (last < 0) this.#open = [];
    this.#prose = last >= 0 && last === blocks.length - 1 && isProse(blocks[last]) ? this.#open[0] : null;
  }

  /** Adds the tokens after `known` characters to the open paragraph. */
  #add(known) {
    const text = this.#text;
    if (!this.#tokens) return this.#prose.append(text.slice(known));
    const piece = text.slice(known);
    const places = Int32Array.from({ length: piece.length }, (_, i) => i);
    this.#prose.append(...this.#tinted(piece, places, known));
  }

  /** Returns the nodes of a block, tinted; `offset`: where it begins in the text; `open`: more of it may come. */
  #draw(block, offset, open = false) {
    if (block.type === "space" || block.type === "def") return [];
    const nodes = [...nodesOf(htmlOf(block)).children];
    if (!open) colour(nodes);
    this.#tint(nodes, block.raw, offset);
    const wanted = missing(nodes);
    if (wanted) wanted.then(() => this.#again(nodes, block, offset, open));
    return nodes;
  }

  /** Draws a block again whose libraries have come, unless its nodes are gone by now. They may not be on the page yet. */
  #again(nodes, block, offset, open) {
    if (!nodes[0]?.parentNode) return;
    const fresh = this.#draw(block, offset, open);
    nodes[0].before(...fresh);
    for (const node of nodes) node.remove();
    if (this.#open === nodes) this.#open = fresh;
  }

  #tint(nodes, source, offset) {
    if (!this.#tokens) return;
    const texts = nodes.flatMap(textsOf);
    const places = align(source, texts.map((node) => node.data));
    for (const [index, node] of texts.entries()) {
      const parts = this.#tinted(node.data, places[index], offset);
      if (parts.length > 1 || parts[0] instanceof Element) node.replaceWith(...parts);
    }
  }

  /** Returns text as strings and, for each stretch of a marked token, a tinted span. */
  #tinted(text, places, offset) {
    const parts = [];
    let pending = "";
    for (const { start, end, token } of runs(places, this.#ends, offset)) {
      const piece = text.slice(start, end);
      const shown = this.#tokens[token];
      if (!isMarked(shown)) {
        pending += piece;
        continue;
      }
      if (pending) parts.push(pending);
      pending = "";
      parts.push(h("span", { class: `tok ${lengthClass(shown)}${shown.d ? " drafted" : ""}`, "data-t": token }, piece));
    }
    if (pending) parts.push(pending);
    return parts;
  }
}

/** Returns the text nodes below a node that show the answer's own characters. */
function textsOf(node) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, (at) => {
    if (at.nodeType === Node.TEXT_NODE) return /\S|^[ \t]+$/.test(at.data) ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT;
    return at.matches(".math, .code-head") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_SKIP;
  });
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
}
