// A message of the user's turned into a text box, to be sent again as a new branch.

import { button, h } from "./dom.js";
import { guarded } from "./tell.js";
import { grows, isSend } from "./typing.js";

/** Shows the text box in place of a message's text. `send(text)` returns a promise of whether the text was taken. */
export function edit(view, send, begun = view.message.text) {
  if (view.element.querySelector(".editor")) return;
  const input = h("textarea", { class: "edit-input", rows: "1", "aria-label": "Edit your message", "data-testid": "edit-input", dir: "auto" });
  input.value = begun;
  const close = () => {
    editor.remove();
    view.element.classList.remove("editing");
    view.element.querySelector('[data-testid="edit"]')?.focus();
  };
  const finish = () => {
    const text = input.value.trim();
    if (!text) return;
    close();
    guarded(async () => (await send(text)) || edit(view, send, text));
  };
  const cancel = button("Cancel", { "data-testid": "edit-cancel", onclick: close });
  const done = button("Send", { class: "primary", "data-testid": "edit-send", onclick: finish });
  const editor = h("div", { class: "editor" }, input, h("div", { class: "row" }, cancel, done));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (isSend(event)) {
      event.preventDefault();
      finish();
    }
  });
  view.element.classList.add("editing");
  view.text.after(editor);
  grows(input);
  input.focus();
}
