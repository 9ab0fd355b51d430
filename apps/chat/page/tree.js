// A conversation is a tree: a message's `parent` is the message before it, and branches are siblings. Pure: no DOM.
//
// `messages` is a Map from id to message, in the order in which they were written.

/** Returns the messages from the root to the message `leaf`; [] if there is none. A circle or a lost parent ends the path. */
export function path(messages, leaf) {
  const found = [];
  const seen = new Set();
  let id = leaf;
  while (id !== null && id !== undefined && messages.has(id) && !seen.has(id)) {
    const message = messages.get(id);
    seen.add(id);
    found.unshift(message);
    id = message.parent;
  }
  return found;
}

/** Returns the messages whose parent is `parent`, oldest first. `parent` null: the roots. */
export function children(messages, parent) {
  return [...messages.values()].filter((message) => (message.parent ?? null) === (parent ?? null));
}

/** Returns a message's branches: all children of its parent, the message among them, oldest first. */
export function siblings(messages, message) {
  return children(messages, message.parent);
}

/** Returns whether an answer is its conversation's first, which has no earlier prompt to go on from. */
export function isFirst(messages, message) {
  for (const other of messages.values()) if (other.role === "assistant") return other.id === message.id;
  return false;
}

/** Returns the leaf that a branch was last continued to: from `message` down, always the newest child. */
export function tip(messages, message) {
  const newest = new Map();
  for (const other of messages.values()) newest.set(other.parent ?? null, other);
  let at = message;
  const seen = new Set();
  while (newest.has(at.id) && !seen.has(at.id)) {
    seen.add(at.id);
    at = newest.get(at.id);
  }
  return at;
}

/** Returns the leaf of the sibling `by` places after a message (-1: the one before), or null if there is none. */
export function neighbour(messages, message, by) {
  const branches = siblings(messages, message);
  const other = branches[branches.indexOf(message) + by];
  return other ? tip(messages, other) : null;
}
