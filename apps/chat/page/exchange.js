// Conversations out to files, and files back in.

import * as api from "./api.js";
import { emit } from "./bus.js";
import { h } from "./dom.js";
import { plural } from "./figures.js";
import { banner, toast } from "./tell.js";
import { openConversation } from "./ways.js";

const LIMIT = 256 * 2 ** 20; // bytes of a file; the server takes no more

/** Saves one conversation as a file. format: "json" or "md". */
export async function exportOne({ id, title }, format) {
  const { blob, name } = await api.download(`conversations/${encodeURIComponent(id)}/export?format=${format}`);
  save(blob, name ?? `${fileName(title)}.${format}`);
}

/** Saves all conversations as one JSON file. */
export async function exportAll() {
  const { blob, name } = await api.download("export");
  save(blob, name ?? "conversations.json");
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Returns a title as a file name that every system takes. */
function fileName(title) {
  return title.replace(/[\\/:*?"<>|\p{Cc}]/gu, " ").trim().slice(0, 80) || "conversation";
}

/** Reads the file chosen in a file input and gives it to the server, which checks it. */
export async function importFile(input) {
  const [file] = input.files;
  input.value = ""; // so that the same file can be chosen again
  if (!file) return;
  if (file.size > LIMIT) return banner(`${file.name} is larger than 256 MiB and was not read.`, { until: "shown taken" });
  const value = parsed(await file.text());
  if (value === undefined) return banner(`${file.name} is not JSON. Nothing was imported.`, { until: "shown taken" });
  const { imported, ids } = await api.call("POST", "import", value);
  toast(`${plural(imported, "conversation")} imported`);
  emit("saved", null);
  if (ids.length === 1) await openConversation(ids[0]);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    if (error instanceof SyntaxError) return undefined;
    throw error;
  }
}
