import assert from "node:assert/strict";
import { test } from "node:test";

import { EventReader, frames } from "../../../apps/chat/page/sse.js";

const TEXT = 'data: {"type":"text","text":"één 猫 👩‍👩‍👧"}\n\n: a comment\n\ndata: {"a":\ndata: 1}\r\n\r\nevent: x\ndata:[DONE]\n\ndata: {"b":2}\n\n';
const FRAMES = [{ type: "text", text: "één 猫 👩‍👩‍👧" }, { a: 1 }, { b: 2 }];

async function read(chunks) {
  const found = [];
  for await (const frame of frames(chunks)) found.push(frame);
  return found;
}

test("events are the same however their bytes are cut", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  for (const size of [1, 2, 3, 7, bytes.length]) {
    const chunks = [];
    for (let at = 0; at < bytes.length; at += size) chunks.push(bytes.slice(at, at + size));
    assert.deepEqual(await read(chunks), FRAMES, `${size} bytes at once`);
  }
});

test("an event that has not ended yet is kept back", () => {
  const reader = new EventReader();
  assert.deepEqual(reader.push("data: on"), []);
  assert.deepEqual(reader.push("e\n"), []);
  assert.deepEqual(reader.push("\n"), ["one"]);
  assert.equal(reader.rest, "");
});

test("a stream that breaks off in an event yields only the whole ones", async () => {
  assert.deepEqual(await read([new TextEncoder().encode('data: {"a":1}\n\ndata: {"b":')]), [{ a: 1 }]);
});
