import assert from "node:assert/strict";
import { test } from "node:test";

import { children, neighbour, path, siblings, tip } from "../../../apps/chat/page/tree.js";

const PARENTS = { a: null, b: "a", c: "b", d: "c", e: "a", f: "e", g: "b", r: null };
const tree = new Map(Object.entries(PARENTS).map(([id, parent]) => [id, { id, parent }]));
const ids = (messages) => messages.map(({ id }) => id).join("");

test("a path goes from the root to its leaf", () => {
  assert.equal(ids(path(tree, "d")), "abcd");
  assert.equal(ids(path(tree, "a")), "a");
});

test("no leaf, or one that is not there, has no path", () => {
  assert.deepEqual([path(tree, null), path(tree, undefined), path(tree, "x")], [[], [], []]);
});

test("a circle of parents ends the path", () => {
  const circle = new Map([["a", { id: "a", parent: "b" }], ["b", { id: "b", parent: "a" }]]);
  assert.equal(ids(path(circle, "a")), "ba");
  assert.equal(tip(circle, circle.get("a")).id, "a");
});

test("branches are siblings in the order in which they were written", () => {
  assert.equal(ids(siblings(tree, tree.get("e"))), "be");
  assert.equal(ids(siblings(tree, tree.get("a"))), "ar");
  assert.equal(ids(children(tree, "b")), "cg");
});

test("a branch is shown as far as it was continued last", () => {
  assert.equal(tip(tree, tree.get("e")).id, "f");
  assert.equal(tip(tree, tree.get("b")).id, "g");
});

test("a neighbour is the leaf of the branch beside, null at the ends", () => {
  assert.equal(neighbour(tree, tree.get("b"), 1).id, "f");
  assert.equal(neighbour(tree, tree.get("e"), 1), null);
  assert.equal(neighbour(tree, tree.get("b"), -1), null);
});
