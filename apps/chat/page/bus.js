// What happens, told to whoever shows it. Names of events stand beside their listeners.

const target = new EventTarget();

/** Tells all listeners of `name`. */
export function emit(name, detail = null) {
  target.dispatchEvent(new CustomEvent(name, { detail }));
}

/** Calls `listener(detail)` whenever one of these names is told; names are separated by spaces. */
export function on(names, listener) {
  for (const name of names.split(" ")) target.addEventListener(name, (event) => listener(event.detail));
}
