// Server-sent events out of text that arrives in arbitrary pieces. Pure: no DOM, no network.

/** Collects events: `push(text)` returns the data of every event that is complete by now. */
export class EventReader {
  #rest = "";

  /** Returns the `data` of each complete event, as text; lines of one event are joined by newlines. Comments are dropped. */
  push(text) {
    this.#rest += text;
    const events = [];
    for (let end = boundary(this.#rest); end; end = boundary(this.#rest)) {
      const data = dataOf(this.#rest.slice(0, end.at));
      this.#rest = this.#rest.slice(end.at + end.length);
      if (data !== null) events.push(data);
    }
    return events;
  }

  /** What has arrived and is not a whole event yet. */
  get rest() {
    return this.#rest;
  }
}

/** Returns where the first event ends and how long its empty line is, or null. A lone CR may be half of a CRLF: not an end. */
function boundary(text) {
  const match = /\r\n\r\n|\n\n|\r\r(?!\n)/.exec(text);
  return match && { at: match.index, length: match[0].length };
}

function dataOf(event) {
  const lines = event.split(/\r\n|\n|\r/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}

/** Yields the JSON value of every event of a byte stream. Data that is not JSON, as `[DONE]`, is left out. */
export async function* frames(chunks) {
  const decoder = new TextDecoder();
  const reader = new EventReader();
  for await (const chunk of chunks) {
    for (const data of reader.push(decoder.decode(chunk, { stream: true }))) {
      const frame = parsed(data);
      if (frame !== undefined) yield frame;
    }
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch (error) {
    if (error instanceof SyntaxError) return undefined;
    throw error;
  }
}
