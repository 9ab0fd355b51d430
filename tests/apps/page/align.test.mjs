import assert from "node:assert/strict";
import { test } from "node:test";

import { align, endsOf, runs, tokenAt } from "../../../apps/chat/page/align.js";

/** The source's characters at the places found, as text. */
function read(source, pieces) {
  return align(source, pieces).map((places) => [...places].map((place) => source[place]).join(""));
}

test("text without markup is aligned character by character", () => {
  assert.deepEqual([...align("a boat", ["a boat"])[0]], [0, 1, 2, 3, 4, 5]);
});

test("markup between pieces is passed over", () => {
  const source = "see **the** [docs](https://example.org/a?b=c) now";
  assert.deepEqual(read(source, ["see ", "the", " ", "docs", " now"]), ["see ", "the", " ", "docs", " now"]);
});

test("a code fence and its language are passed over", () => {
  const [places] = align("```python\nprint(1)\n```", ["print(1)\n"]);
  assert.equal(places[0], "```python\n".length);
});

test("a character that the source writes otherwise does not throw off those after it", () => {
  const source = "a &lt; b, 1\\. c";
  const [places] = align(source, ["a < b, 1. c"]);
  assert.equal(source[places[4]], "b");
  assert.equal(places.at(-1), source.length - 1);
});

test("a piece that the source does not have stays where it is", () => {
  const [lost, found] = align("abc", ["☑", "abc"]);
  assert.deepEqual([[...lost], [...found]], [[0], [0, 1, 2]]);
});

test("every character lies in the token that wrote it", () => {
  const tokens = ["Once", " upon a", " **time", "**, the", "re"].map((t) => ({ t }));
  const source = tokens.map(({ t }) => t).join("");
  const ends = endsOf(tokens);
  const pieces = ["Once upon a ", "time", ", there"];
  const found = align(source, pieces).map((places, i) => runs(places, ends).map(({ start, end, token }) => [pieces[i].slice(start, end), token]));
  assert.deepEqual(found, [[["Once", 0], [" upon a", 1], [" ", 2]], [["time", 2]], [[", the", 3], ["re", 4]]]);
});

test("runs know where the aligned source begins in the text", () => {
  const ends = endsOf([{ t: "abc" }, { t: "de" }, { t: "f" }]);
  const [places] = align("de", ["de"]);
  assert.deepEqual(runs(places, ends, 3), [{ start: 0, end: 2, token: 1 }]);
});

test("text after the last token belongs to none", () => {
  assert.equal(tokenAt([3, 5], 5), 2);
  assert.deepEqual(runs(Int32Array.of(4, 5, 6), [3, 5]), [{ start: 0, end: 1, token: 1 }, { start: 1, end: 3, token: 2 }]);
});

test("empty tokens hold no character", () => {
  const ends = endsOf([{ t: "a" }, { t: "" }, { t: "b" }]);
  assert.deepEqual([tokenAt(ends, 0), tokenAt(ends, 1)], [0, 2]);
});

test("eighty thousand characters are aligned in a moment", () => {
  const source = "There was **a boy** named Timmy & he had a [boat](x).\n".repeat(1500);
  const shown = ["There was ", "a boy", " named Timmy & he had a ", "boat", ".\n"];
  const pieces = Array.from({ length: 1500 }, () => shown).flat();
  const places = align(source, pieces);
  assert.equal(places.at(-1).at(-1), source.length - 1);
});
