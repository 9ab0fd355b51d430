// The bar above the conversation: its title, the model, and what can be shown beside it.

import * as api from "./api.js";
import { on } from "./bus.js";
import { button, byId, h } from "./dom.js";
import { exportOne } from "./exchange.js";
import { asked, menuButton } from "./menu.js";
import { app, patch, refreshState } from "./model.js";
import { shownPanel, togglePanel } from "./panel.js";
import { closeRace, openRace, raceIsOpen } from "./race.js";
import { change, deleteOne, placeItems } from "./sidebar.js";
import { banner, guarded, hideBanner } from "./tell.js";
import { tintButton } from "./tint.js";
import { toggleSidebar } from "./ways.js";

const OTHER = "\u0000other"; // no model's name

let title = null;
let picker = null;

/** Makes the toolbar. */
export function startToolbar() {
  title = h("input", { class: "title", "aria-label": "Title of the conversation", "data-testid": "title", maxlength: "200", dir: "auto", placeholder: "New conversation" });
  title.addEventListener("change", rename);
  title.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === "Escape") && leave(event));
  picker = h("select", { class: "picker", "aria-label": "Model", "data-testid": "model-picker" });
  picker.addEventListener("change", () => guarded(() => (picker.value === OTHER ? chooseOther() : choose(picker.value))));
  const race = button("Race against the base", { icon: "flag", caption: "Race", "data-testid": "race-open", onclick: () => (raceIsOpen() ? closeRace() : openRace()) });
  const words = button("Vocabulary", { icon: "panel", caption: "Vocabulary", "data-testid": "vocabulary-open", onclick: () => togglePanel("vocabulary") });
  const dials = button("Settings", { icon: "sliders", caption: "Settings", "data-testid": "settings-open", onclick: () => togglePanel("settings") });
  const toggle = button("Sidebar", { icon: "sidebar", "data-testid": "sidebar-toggle", onclick: toggleSidebar });
  const more = menuButton("More about this conversation", items, { caption: "More", "data-testid": "chat-menu" });
  const heading = h("div", { class: "heading" }, title, picker);
  byId("toolbar").append(toggle, heading, h("div", { class: "group" }, tintButton(), race, words, dials, more));
  on("shown state changed answered path", draw);
  on("panel", () => {
    words.setAttribute("aria-pressed", String(shownPanel() === "vocabulary"));
    dials.setAttribute("aria-pressed", String(shownPanel() === "settings"));
  });
  on("race", (open) => race.setAttribute("aria-pressed", String(open)));
}

function items() {
  const conversation = app.conversation;
  const file = (format) => () => guarded(() => exportOne(conversation, format));
  return [
    { label: "Rename", icon: "edit", run: () => title.select() },
    ...(conversation.id === null
      ? []
      : [
          ...placeItems(conversation),
          { label: "Export as Markdown", icon: "upload", testid: "export-md", run: file("md") },
          { label: "Export as JSON", icon: "upload", testid: "export-json", run: file("json") },
          null,
          { label: "Delete…", icon: "trash", testid: "delete", danger: true, run: () => guarded(() => deleteOne(conversation)) },
        ]),
  ];
}

function leave(event) {
  if (event.key === "Escape") title.value = app.conversation.title;
  event.stopPropagation();
  title.blur();
  byId("input").focus();
}

function rename() {
  const wanted = title.value.trim();
  const conversation = app.conversation;
  if (!wanted) title.value = conversation.title;
  else if (conversation.id === null) conversation.title = wanted;
  else guarded(() => change(conversation.id, { title: wanted }));
}

async function chooseOther() {
  draw(); // back to the model that answers, in case of "Cancel"
  const name = await asked("Open another model", "A model folder or a hub id. At most one other model stays open.", "Open");
  if (name) await choose(name);
}

/** Opens a model if it is not loaded, then lets it answer in this conversation. */
async function choose(name) {
  const known = app.state.models.find((model) => model.name === name);
  if (!known?.loaded) {
    banner(`Opening ${name}…`, { kind: "news", closes: false });
    picker.disabled = true;
    try {
      await opened(name);
    } finally {
      picker.disabled = false;
      hideBanner();
      draw();
    }
    await refreshState();
  }
  await patch(app.conversation, { model: name });
}

async function opened(name) {
  for await (const frame of api.stream("models", { name })) {
    if (frame.type === "error") throw new api.ApiError(frame.message, 500);
  }
}

function draw() {
  const conversation = app.conversation;
  if (!conversation) return;
  if (document.activeElement !== title) title.value = conversation.title ?? "";
  document.title = conversation.title ? `${conversation.title} · mlx_zip` : "mlx_zip";
  const names = (app.state?.models ?? []).map((model) => model.name);
  if (conversation.modelName && !names.includes(conversation.modelName)) names.unshift(conversation.modelName);
  const options = names.map((name) => h("option", { value: name }, label(name)));
  picker.replaceChildren(...options, h("hr", {}), h("option", { value: OTHER }, "Open another…"));
  picker.value = conversation.modelName;
  picker.hidden = !names.length;
}

function label(name) {
  const model = app.state?.models?.find((other) => other.name === name);
  return model && !model.hypertokens ? `${name} (no hypertokens)` : name;
}
