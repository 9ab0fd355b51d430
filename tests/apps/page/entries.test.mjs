import assert from "node:assert/strict";
import { test } from "node:test";

import { Entries, isMarked, lengthClass, visible, whereLearned } from "../../../apps/chat/page/entries.js";

const token = (...p) => ({ t: p.join(""), p, o: "answer", a: 7 });

test("entries are ranked by uses, then by length", () => {
  const entries = new Entries();
  entries.use([token("a", "b"), { t: "x" }, token("c", "d", "e"), token("f", "g"), token("f", "g")]);
  assert.deepEqual(entries.most(3).map((entry) => [entry.parts.join(""), entry.uses]), [["fg", 2], ["cde", 1], ["ab", 1]]);
  assert.equal(entries.most(1).length, 1);
  assert.equal(entries.distinct, 3);
});

test("entries with other parts are other entries", () => {
  const entries = new Entries();
  entries.use([token("ab", "c"), token("a", "bc")]);
  assert.equal(entries.distinct, 2);
});

test("what was learned last comes first", () => {
  const entries = new Entries();
  entries.learn([["a", "b"], ["c", "d"]]);
  entries.learn([["e", "f"]]);
  entries.learn(null);
  assert.deepEqual(entries.newest(2), [["e", "f"], ["c", "d"]]);
});

test("a tint shows how many base tokens there are, five standing for more", () => {
  assert.deepEqual([token("a", "b"), token("a", "b", "c"), token(..."abcdefg")].map(lengthClass), ["l2", "l3", "l5"]);
});

test("hypertokens and drafted tokens are marked, other tokens are not", () => {
  const tokens = [token("a", "b"), { t: "a", d: true }, { ...token("a", "b"), d: true }, { t: "a" }, undefined];
  assert.deepEqual(tokens.map(isMarked), [true, true, true, false, false]);
  assert.equal(lengthClass({ t: "a", d: true }), "l1");
});

test("it is said where an entry was learned", () => {
  assert.equal(whereLearned(token("a", "b")), "Learned in this answer, complete at base token 7");
  assert.match(whereLearned({ o: "pack", a: -1 }), /^From a pack/);
  assert.match(whereLearned({ o: "prompt", a: 1234 }), /prompt, complete at base token 1,234$/);
  assert.equal(whereLearned({ o: "" }), "Origin not known");
});

test("spaces and line ends can be seen", () => {
  assert.equal(visible(" a\n\tb"), "·a⏎⇥b");
});

test("a token whose text came in several pieces is one use", () => {
  const entries = new Entries();
  entries.use([token("a", "b"), { ...token("a", "b"), c: true }]);
  assert.equal(entries.most(1)[0].uses, 1);
});
