// What a conversation is answered with: system prompt, packs and sampling. Changes are kept as they are made.

import { on } from "./bus.js";
import { button, byId, debounced, h } from "./dom.js";
import { bytes, count } from "./figures.js";
import { app, patch } from "./model.js";
import { guarded } from "./tell.js";

// name -> label, attributes of the input, what it does
const SAMPLING = {
  temp: ["Temperature", { min: "0", max: "2", step: "0.05" }, "0: always the most likely. Higher: more varied."],
  top_p: ["Top p", { min: "0", max: "1", step: "0.01" }, "Keeps the likeliest ids that together hold this share."],
  top_k: ["Top k", { min: "0", max: "2147483647", step: "1" }, "Keeps this many of the likeliest ids; 0: all."],
  min_p: ["Min p", { min: "0", max: "1", step: "0.01" }, "Drops ids below this share of the likeliest."],
  repetition_penalty: ["Repetition penalty", { min: "0.01", step: "0.05" }, "Above 1: words come back less often."],
  max_tokens: ["Longest answer", { min: "1", max: "2147483647", step: "1" }, "In base tokens."],
  seed: ["Seed", { min: "0", max: "9007199254740991", step: "1" }, "The same seed gives the same answer."],
};

const NONE = { seed: "random", repetition_penalty: "off" }; // what no value means

const inputs = {};
const problems = {}; // name -> the line that says why a value is refused
let system = null;
let refusal = null; // the line that says why a system prompt is refused
let without = null; // button that takes away a system prompt that the model does not take
let packs = null;
let storage = null;

/** Returns the content of the tab. */
export function settings() {
  system = h("textarea", { id: "system", class: "field", rows: "4", "data-testid": "system", dir: "auto", placeholder: "None" });
  system.setAttribute("aria-describedby", "system-refusal");
  refusal = h("p", { id: "system-refusal", class: "problem", role: "status", "data-testid": "system-refusal" });
  without = button("Do without it", { "data-testid": "system-remove", onclick: removeSystem });
  system.addEventListener("input", () => save(app.conversation, system.value));
  system.addEventListener("change", () => save.now()); // whoever sends a message at once has left the field before
  packs = h("div", { class: "packs", role: "group", "aria-labelledby": "packs-title", "data-testid": "packs" });
  storage = h("div", { class: "quiet", "data-testid": "storage" });
  on("shown state", draw);
  on("changed", ({ conversation, fields }) => conversation === app.conversation && ("model" in fields || "packs" in fields) && draw());
  on("leaving", () => save.now());
  return [
    h("section", {}, h("h2", {}, h("label", { for: "system" }, "System prompt")), system, refusal, without),
    h("section", {}, h("h2", { id: "packs-title" }, "Packs"), packs),
    h("section", {}, h("h2", {}, "Sampling"), ...Object.keys(SAMPLING).map(field), button("Use the defaults", { "data-testid": "sampling-reset", onclick: reset })),
    h("section", {}, h("h2", {}, "Storage"), storage),
  ];
}

const save = debounced((conversation, text) => guarded(() => saveSystem(conversation, text)), 400);

async function saveSystem(conversation, text) {
  refusal.textContent = "";
  try {
    await patch(conversation, { system: text });
  } catch (error) {
    if (error.status !== 400) throw error;
    if (conversation === app.conversation) refusal.textContent = error.message;
  }
}

function removeSystem() {
  system.value = "";
  save(app.conversation, "");
  return save.now().then(draw);
}

function field(name) {
  const [label, attributes, hint] = SAMPLING[name];
  const id = `sampling-${name}`;
  const input = h("input", { id, type: "number", ...attributes, "aria-describedby": `${id}-problem ${id}-hint`, "data-testid": id });
  inputs[name] = input;
  problems[name] = h("p", { id: `${id}-problem`, class: "problem", role: "status", "data-testid": `${id}-problem` });
  input.addEventListener("change", () => changed());
  return h("div", { class: "setting" }, h("label", { for: id }, label), input, problems[name], h("p", { id: `${id}-hint`, class: "quiet" }, hint));
}

/** Keeps what stands in the fields; a field with a value out of range says so, and its old value stays in force. */
function changed() {
  const sampling = {};
  for (const [name, input] of Object.entries(inputs)) {
    const before = app.conversation.sampling?.[name];
    const problem = problemOf(input, SAMPLING[name][1]);
    showProblem(name, problem);
    if (problem && before !== undefined) sampling[name] = before;
    else if (!problem && input.value !== "") sampling[name] = Number(input.value);
  }
  return guarded(() => patch(app.conversation, { sampling }));
}

function problemOf({ validity }, { min, max, step }) {
  const whole = step === "1"; // a finer value than another step is as good
  const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = validity;
  if (!(badInput || rangeUnderflow || rangeOverflow || (whole && stepMismatch))) return "";
  const range = max === undefined ? `of at least ${min}` : `between ${min} and ${max}`;
  return `Not used: it must be a ${whole ? "whole number" : "number"} ${range}.`;
}

function showProblem(name, problem) {
  problems[name].textContent = problem;
  inputs[name].setAttribute("aria-invalid", String(problem !== ""));
}

function reset() {
  for (const input of Object.values(inputs)) input.value = "";
  changed();
}

function draw() {
  const conversation = app.conversation;
  if (!conversation || !app.state) return;
  drawSystem(conversation);
  for (const [name, input] of Object.entries(inputs)) {
    showProblem(name, "");
    input.value = conversation.sampling?.[name] ?? "";
    input.placeholder = app.state.defaults?.sampling?.[name] ?? NONE[name] ?? "";
  }
  drawPacks(conversation);
  storage.replaceChildren(...storageTexts(app.state.storage ?? {}));
}

/** A model whose chat template takes no system prompt has the field switched off, with the reason. */
function drawSystem(conversation) {
  const reason = app.state.models?.find(({ name }) => name === conversation.modelName)?.no_system;
  system.value = conversation.system ?? app.state.defaults?.system ?? "";
  system.disabled = Boolean(reason);
  refusal.className = reason ? "quiet" : "problem";
  system.placeholder = reason ? "Not with this model" : "None";
  refusal.textContent = reason ? `${reason[0].toUpperCase()}${reason.slice(1)}.` : "";
  without.hidden = !reason || !system.value;
}

function storageTexts({ file, bytes: size, note }) {
  const kept = file ? `Conversations are kept in ${file} (${bytes(size)}), readable by you alone.` : "Conversations are not kept: they are gone when the program ends.";
  return [kept, note].filter(Boolean).map((text) => h("p", {}, text));
}

function drawPacks(conversation) {
  const known = app.state.packs ?? [];
  const note = known.length ? "Entries that the codebook begins with. Several packs are merged; with none chosen, the model begins with its own." : "No packs are installed.";
  packs.replaceChildren(h("p", { class: "quiet" }, note), ...known.map((pack) => packRow(pack, conversation)));
}

function packRow({ name, entries, reason }, conversation) {
  const box = h("input", { type: "checkbox", "data-testid": `pack-${name}`, value: name, disabled: Boolean(reason) });
  box.checked = conversation.packs.includes(name);
  box.addEventListener("change", () => {
    const chosen = [...byId("panel-settings").querySelectorAll(".packs input:checked")].map((input) => input.value);
    guarded(() => patch(conversation, { packs: chosen }));
  });
  return h("label", { class: "pack" }, box, h("span", {}, name), h("span", { class: reason ? "quiet reason" : "quiet" }, reason || `${count(entries)} entries`));
}
