// The codebook as far as a conversation shows it: which entries were used how often. Pure: no DOM.

/** Counts the uses of hypertokens, by their parts. */
export class Entries {
  #found = new Map(); // parts joined by a character that no text holds -> {parts, uses, origin, at, order}
  learned = []; // parts of entries, newest last

  /** Counts the hypertokens among tokens. A token whose text came in several pieces ("c": it goes on) counts once. */
  use(tokens) {
    for (const token of tokens ?? []) {
      if (!token.p?.length || token.c) continue;
      const entry = this.#entry(token.p);
      entry.uses++;
      entry.origin = token.o ?? "";
      entry.at = token.a ?? -1;
    }
  }

  /** Notes entries that were learned; each is a list of parts. */
  learn(entries) {
    for (const parts of entries ?? []) this.learned.push(parts);
  }

  #entry(parts) {
    const key = parts.join("\u0000");
    let entry = this.#found.get(key);
    if (!entry) {
      entry = { parts, uses: 0, origin: "", at: -1, order: this.#found.size };
      this.#found.set(key, entry);
    }
    return entry;
  }

  /** Returns the entries used most often, at most `limit`; among equals the longer one, then the one used first. */
  most(limit) {
    const rank = (a, b) => b.uses - a.uses || b.parts.length - a.parts.length || a.order - b.order;
    return [...this.#found.values()].sort(rank).slice(0, limit);
  }

  /** Returns the entries learned last, newest first. */
  newest(limit) {
    return this.learned.slice(-limit).reverse();
  }

  get distinct() {
    return this.#found.size;
  }
}

/** Returns the class of a token's tint: by how many base tokens it holds, 1 to 5, where 5 means "or more". */
export function lengthClass(token) {
  return `l${Math.min(5, token.p?.length || 1)}`;
}

/** Returns whether a token is marked in the text: a hypertoken, or a token that a draft had proposed ("d"). */
export function isMarked(token) {
  return Boolean(token?.p?.length || token?.d);
}

/** Returns where an entry was learned, as a sentence. */
export function whereLearned(token) {
  const at = token.a >= 0 ? `, complete at base token ${token.a.toLocaleString("en-US")}` : "";
  const places = { pack: "From a pack: known before the first word", prompt: `Learned in the prompt${at}`, answer: `Learned in this answer${at}` };
  return places[token.o] ?? "Origin not known";
}

/** Returns a text with its spaces and line ends visible. */
export function visible(text) {
  return text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}
