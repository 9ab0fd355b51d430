// What the text boxes share.

/** Lets a text box grow with its text; its style sheet sets how far. Returns a function that fits it at once. */
export function grows(input) {
  const fit = () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + input.offsetHeight - input.clientHeight}px`;
  };
  input.addEventListener("input", fit);
  fit();
  return fit;
}

/** Returns whether a key event sends: Enter without Shift, and not the Enter that accepts a word of an input method. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}
