// Files that are dropped on the page or pasted: texts go into the message box, anything else is refused in one line.

import { byId } from "./dom.js";
import { raceIsOpen } from "./race.js";
import { banner, guarded } from "./tell.js";

const LIMIT = 2 ** 20; // bytes of a text

/** Starts to take files. Whatever is dropped, the browser does not leave the page. */
export function startDropped() {
  addEventListener("dragover", (event) => ours(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!ours(event)) return;
    event.preventDefault();
    guarded(() => take([...event.dataTransfer.files], event.target));
  });
  addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    const words = event.clipboardData.getData("text/plain");
    if (!files.length || (words && !areNames(words, files))) return; // a word processor copies words and a picture of them
    event.preventDefault();
    guarded(() => take(files, event.target));
  });
}

/** Whether words are the names of the files that they were copied with, as file managers do. */
function areNames(words, files) {
  return words.split(/[\r\n]+/).every((word, index) => word === files[index]?.name);
}

/** Words that are dropped on a text box are the browser's to put in. */
function ours({ dataTransfer, target }) {
  return dataTransfer.types.includes("Files") || !target.closest?.("textarea, input");
}

async function take(files, target) {
  const texts = await Promise.all(files.map(textOf));
  const refused = files.filter((_, index) => texts[index] === null).map(({ name }) => name);
  const found = texts.filter((text) => text !== null);
  if (found.length) insert(boxFor(target), found.join("\n\n"));
  if (refused.length) banner(`${refused.join(", ")}: only text of at most 1 MiB can be read, no images or other files.`, { until: "shown taken" });
}

/** Returns a file's text, null for what is no text. */
async function textOf(file) {
  if (file.size > LIMIT) return null;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\u0000") ? null : text;
  } catch (error) {
    if (error instanceof TypeError || error.name === "NotReadableError" || error.name === "NotFoundError") return null; // bytes that are no UTF-8, or a folder
    throw error;
  }
}

function boxFor(target) {
  return target.closest?.("textarea:enabled") ?? (raceIsOpen() ? document.querySelector(".race textarea") : byId("input"));
}

function insert(box, text) {
  box.setRangeText(text, box.selectionStart, box.selectionEnd, "end");
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.focus();
}
