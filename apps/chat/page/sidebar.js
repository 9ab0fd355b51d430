// The list of conversations: search, open, rename, delete, and what concerns them all.

import * as api from "./api.js";
import { emit, on } from "./bus.js";
import { button, byId, debounced, h, icon } from "./dom.js";
import { exportAll, exportOne, importFile } from "./exchange.js";
import { milliseconds, period, when } from "./figures.js";
import { asked, confirmed, menuButton } from "./menu.js";
import { app, patch, remove, streaming } from "./model.js";
import { guarded, toast } from "./tell.js";
import { themeButton } from "./theme.js";
import { openConversation, openNew } from "./ways.js";

const PAGE = 100; // conversations fetched at once

let list = null;
let search = null;
let shown = []; // what the server said: the pinned ones, those in folders, then the others, each newest first
let total = 0;
let drawn = ""; // what the list shows
let later = null; // timer of a drawing that had to wait
let request = 0; // number of the newest request, so that a late answer to an older one is dropped

/** Makes the sidebar. */
export function startSidebar() {
  const fresh = button("New conversation", { icon: "plus", "data-testid": "new-chat", onclick: openNew });
  const brand = h("div", { class: "brand" }, h("img", { src: new URL("icon.svg", import.meta.url).pathname, alt: "", width: "22", height: "22" }), h("h1", {}, "mlx_zip"), fresh);
  search = h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search conversations", "data-testid": "search", autocomplete: "off" });
  list = h("div", { class: "list", "data-testid": "conversations" });
  byId("sidebar").append(brand, h("div", { class: "search" }, icon("search"), search), list, foot());
  search.addEventListener("input", debounced(() => refreshList(), 120));
  list.addEventListener("scroll", () => nearEnd() && guarded(more), { passive: true });
  on("created withdrawn saved answered sending", () => refreshList());
  on("shown answering answered", mark);
}

function foot() {
  const file = h("input", { type: "file", accept: ".json,application/json", hidden: true, "data-testid": "import-file", "aria-label": "File to import" });
  file.addEventListener("change", () => guarded(() => importFile(file)));
  const items = () => [
    { label: "Import…", icon: "download", testid: "import", run: () => file.click() },
    { label: "Export all", icon: "upload", testid: "export-all", run: () => guarded(exportAll) },
    null,
    { label: "Delete all…", icon: "trash", testid: "delete-all", danger: true, run: () => guarded(deleteAll) },
  ];
  const keys = button("Keyboard shortcuts", { icon: "keyboard", "data-testid": "shortcuts", onclick: () => emit("shortcuts") });
  return h("div", { class: "foot" }, menuButton("Import, export, delete", items, { "data-testid": "all-menu" }), keys, themeButton(), file);
}

async function deleteAll() {
  const yes = await confirmed("Delete all conversations?", "They are removed from this computer's disk. This cannot be undone.", "Delete all");
  if (!yes) return;
  await remove();
  openNew();
  toast("All conversations are deleted");
}

/** Fetches the list anew. */
export function refreshList() {
  return guarded(async () => {
    const found = await fetchList(0, Math.max(PAGE, shown.length));
    if (!found) return;
    [shown, total] = [found.conversations, found.total];
    takeTitle();
    draw();
  });
}

/** The server names a conversation after its first message. */
function takeTitle() {
  const { conversation } = app;
  const known = shown.find(({ id }) => id === conversation.id);
  if (!known || known.title === conversation.title) return;
  conversation.title = known.title;
  emit("changed", { conversation, fields: {} });
}

async function fetchList(offset, limit) {
  const mine = ++request;
  const query = new URLSearchParams({ search: search.value.trim(), limit, offset });
  const found = await api.call("GET", `conversations?${query}`);
  return mine === request ? found : null;
}

function nearEnd() {
  return shown.length < total && list.scrollHeight - list.scrollTop - list.clientHeight < 400;
}

async function more() {
  const found = await fetchList(shown.length, PAGE);
  if (!found) return;
  const known = new Set(shown.map(({ id }) => id));
  shown = [...shown, ...found.conversations.filter(({ id }) => !known.has(id))];
  total = found.conversations.length ? found.total : shown.length;
  draw();
}

function draw() {
  clearTimeout(later);
  if (list.querySelector('.rename, [aria-expanded="true"]')) {
    later = setTimeout(draw, 300); // not under somebody's fingers
    return;
  }
  const held = document.activeElement?.closest?.(".conversation") ? document.activeElement : null;
  const focused = held && `[data-id="${CSS.escape(held.closest(".conversation").dataset.id)}"] [data-testid="${held.dataset.testid}"]`;
  const searching = search.value.trim();
  const wanted = JSON.stringify([searching, shown.map(({ id, title, updated, pinned, folder, snippet }) => [id, title, when(updated), pinned, folder, searching && snippet])]);
  if (wanted === drawn) return;
  drawn = wanted;
  const groups = new Map();
  for (const conversation of shown) {
    const { pinned, folder, updated } = conversation;
    const inFolder = !searching && !pinned && folder !== "";
    const name = searching ? "Found" : pinned ? "Pinned" : folder || period(milliseconds(updated));
    const key = JSON.stringify([inFolder, name]); // a folder may be called "Today"
    if (!groups.has(key)) groups.set(key, { name, make: inFolder ? folderOf : group, members: [] });
    groups.get(key).members.push(conversation);
  }
  const parts = [...groups.values()].map(({ name, make, members }) => make(name, members, searching));
  if (!parts.length) parts.push(h("p", { class: "none" }, searching ? "Nothing found" : "No conversations yet"));
  list.replaceChildren(...parts);
  mark();
  if (focused) list.querySelector(focused)?.focus();
}

function group(name, members, searching) {
  return h("section", { "aria-label": name }, h("h2", {}, name), h("ul", {}, members.map((member) => row(member, searching))));
}

/** A folder; which ones are closed is kept in this browser. */
function folderOf(name, members) {
  const title = h("summary", {}, icon("folder"), h("span", { dir: "auto" }, name), h("span", { class: "quiet" }, String(members.length)));
  const element = h("details", { class: "folder", "data-testid": "folder", open: !closedFolders().includes(name) }, title, h("ul", {}, members.map((member) => row(member, ""))));
  // Not "toggle": that comes a moment later, when the page may have been left or the list drawn anew.
  title.addEventListener("click", () => {
    const others = closedFolders().filter((other) => other !== name);
    localStorage.setItem("folders:closed", JSON.stringify(element.open ? [...others, name] : others)); // it is still as it was
  });
  return element;
}

function closedFolders() {
  return JSON.parse(localStorage.getItem("folders:closed") ?? "[]");
}

/** Returns the items of a menu that say where a conversation stands in the list. */
export function placeItems({ id, pinned, folder }) {
  const move = (fields) => () => guarded(() => change(id, fields));
  return [
    pinned ? { label: "Unpin", icon: "pin", testid: "unpin", run: move({ pinned: false }) } : { label: "Pin", icon: "pin", testid: "pin", run: move({ pinned: true }) },
    { label: "Put into a folder…", icon: "folder", testid: "move", run: () => guarded(() => putInto(id)) },
    ...(folder ? [{ label: "Take out of its folder", icon: "folder", testid: "take-out", run: move({ folder: "" }) }] : []),
  ];
}

async function putInto(id) {
  const known = [...new Set(shown.map(({ folder }) => folder).filter(Boolean))];
  const folder = await asked("Put into which folder?", "A new name makes a new folder.", "Put in", known);
  if (folder) await change(id, { folder: folder.slice(0, 100) });
}

function row(conversation, searching) {
  const { id, title, snippet, updated } = conversation;
  const detail = searching && snippet ? marked(snippet, searching) : [when(updated)];
  const link = h(
    "a",
    { href: `#/c/${encodeURIComponent(id)}`, "data-testid": "conversation-link", onclick: (event) => follow(event, id) },
    h("span", { class: "title", dir: "auto" }, title || "New conversation"),
    h("span", { class: "detail", dir: "auto" }, ...detail),
  );
  const item = h("li", { class: "conversation", "data-testid": "conversation", "data-id": id }, link);
  item.append(menuButton(`More about ${title || "this conversation"}`, () => rowItems(conversation, item), { "data-testid": "conversation-menu", title: "More" }));
  return item;
}

function follow(event, id) {
  if (event.metaKey || event.ctrlKey) return; // a new tab
  event.preventDefault();
  guarded(() => openConversation(id));
}

function rowItems(conversation, item) {
  return [
    { label: "Rename", icon: "edit", testid: "rename", run: () => rename(conversation, item) },
    ...placeItems(conversation),
    { label: "Export as Markdown", icon: "upload", testid: "export-md", run: () => guarded(() => exportOne(conversation, "md")) },
    { label: "Export as JSON", icon: "upload", testid: "export-json", run: () => guarded(() => exportOne(conversation, "json")) },
    null,
    { label: "Delete…", icon: "trash", testid: "delete", danger: true, run: () => guarded(() => deleteOne(conversation)) },
  ];
}

function rename(conversation, item) {
  const input = h("input", { class: "rename", value: conversation.title, "aria-label": "Title", "data-testid": "rename-input", maxlength: "200" });
  let over = false;
  const end = (keep) => {
    if (over) return;
    over = true;
    input.remove();
    item.classList.remove("renaming");
    const title = input.value.trim();
    if (keep && title && title !== conversation.title) guarded(() => change(conversation.id, { title }));
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") end(false);
    event.stopPropagation();
  });
  input.addEventListener("blur", () => end(true));
  item.classList.add("renaming");
  item.prepend(input);
  input.select();
}

/** Changes fields of a conversation that may be another one than that on the screen. */
export async function change(id, fields) {
  if (app.conversation.id === id) return patch(app.conversation, fields);
  await api.call("PATCH", `conversations/${encodeURIComponent(id)}`, fields);
  return refreshList();
}

/** Deletes a conversation after asking. */
export async function deleteOne({ id, title }) {
  const yes = await confirmed(`Delete “${title || "this conversation"}”?`, "It is removed from this computer's disk. This cannot be undone.", "Delete");
  if (!yes) return;
  await remove(id);
  if (app.conversation.id === id) openNew();
}

/** Returns a text with the found words marked, as nodes. */
function marked(text, words) {
  const at = text.toLowerCase().indexOf(words.toLowerCase());
  if (at < 0) return [text];
  return [text.slice(0, at), h("mark", {}, text.slice(at, at + words.length)), text.slice(at + words.length)];
}

/** Marks the conversation on the screen, and those whose answers are streaming. */
function mark() {
  const busy = streaming();
  for (const item of list.querySelectorAll(".conversation")) {
    const current = item.dataset.id === String(app.conversation.id);
    item.classList.toggle("current", current);
    item.classList.toggle("busy", busy.has(item.dataset.id));
    if (current) item.firstElementChild.setAttribute("aria-current", "page");
    else item.firstElementChild.removeAttribute("aria-current");
  }
}

/** Puts the cursor into the search field. */
export function focusSearch() {
  search.focus();
  search.select();
}

/** Returns the id of the conversation `by` places below the one on the screen, or null. */
export function neighbourOf(id, by) {
  const at = shown.findIndex((conversation) => conversation.id === id);
  return shown[at < 0 ? 0 : at + by]?.id ?? null;
}
