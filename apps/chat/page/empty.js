// What a new conversation shows: what this is, and requests to begin with.

import { emit } from "./bus.js";
import { h } from "./dom.js";
import { app } from "./model.js";

const STORIES = [
  ["A boy and his boat", "Tell me a story about a boy and his boat."],
  ["A dog named Spot", "Tell me a story with a gentle dog named Spot and a ball in it."],
  ["The curious frog", "Can you tell me a story about a curious frog, please?"],
  ["Lily's red balloon", "I want to hear a story about a little girl named Lily and a red balloon."],
];
const GENERAL = [
  ["Explain an idea", "Explain how compression can make a language model faster, in three short paragraphs."],
  ["Write some code", "Write a Python function that finds the longest repeated substring of a text, with a short test."],
  ["Show a formula", "Derive the formula for the sum of a geometric series, step by step."],
  ["Make a table", "Compare bubble sort, merge sort and quicksort in a Markdown table."],
];

/** Returns the element that stands in an empty conversation. */
export function emptyState() {
  const name = app.conversation.modelName;
  const examples = name.startsWith("stories") ? STORIES : GENERAL;
  return h(
    "div",
    { class: "empty", "data-testid": "empty" },
    mark(),
    h("h2", {}, name.startsWith("stories") ? "What shall the story be about?" : "What would you like to know?"),
    h("p", {}, "Runs of words that come back become one token: watch the vocabulary grow while the model writes."),
    h("div", { class: "examples" }, examples.map(([title, text]) => example(title, text))),
  );
}

function example(title, text) {
  const send = () => emit("send", text);
  return h("button", { type: "button", class: "example", "data-testid": "example", onclick: send }, h("b", {}, title), h("span", {}, text));
}

/** A sentence as the vocabulary sees it: words run together into blocks. */
function mark() {
  const block = (name) => h("i", { class: `block ${name}` });
  return h("div", { class: "mark", "aria-hidden": "true" }, ["l3", "l2", "l1", "l1", "l4", "l1", "l2", "l1", "l3"].map(block));
}
