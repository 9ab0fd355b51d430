import assert from "node:assert/strict";
import { test } from "node:test";

import { blocksOf, htmlOf, isLiteral, isProse } from "../../../apps/chat/page/blocks.js";
import { blockMath, inlineMath } from "../../../apps/chat/page/math.js";

const html = (text) => blocksOf(text).map(htmlOf).join("").trim();

const TEXT = "# One\r\n\r\nTwo *three*\n\n- a\n- b\n\n```js\nx\n```\n\n| a |\n| - |\n| b |\n\n$$x$$\n\n<b>\n\n[r]: http://x.y\n\nlast";

test("blocks concatenate to the text they come from", () => {
  const raw = blocksOf(TEXT).map((block) => block.raw).join("");
  assert.equal(raw.length, TEXT.length);
  assert.equal(raw, TEXT.replaceAll("\r\n", " \n"));
});

test("blocks of a text that is still coming concatenate too", () => {
  for (let end = 0; end <= TEXT.length; end++) {
    const part = TEXT.slice(0, end);
    assert.equal(blocksOf(part).map((block) => block.raw).join("").length, end, JSON.stringify(part));
  }
});

test("markup in an answer stays text", () => {
  assert.equal(html("a <b>c</b>"), "<p>a &lt;b&gt;c&lt;/b&gt;</p>");
  assert.equal(html("<script>alert(1)</script>"), "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>");
  assert.doesNotMatch(html('![x"><img src=y>](http://e.vil/z.png "t")'), /<img/);
});

test("a picture stands as a link", () => {
  assert.equal(html("![a boat](http://e.vil/x.png)"), '<p><a href="http://e.vil/x.png">a boat</a></p>');
});

test("headings begin below those of the page", () => {
  assert.match(html("# Title"), /^<h3 class="h1">Title<\/h3>/);
});

test("formulas are kept apart from Markdown", () => {
  assert.equal(html("so $a_1 * b_1 * c$ is"), '<p>so <span class="math">a_1 * b_1 * c</span> is</p>');
  assert.equal(html("$$\na < b\n$$"), '<p><span class="math display">a &lt; b</span></p>');
  assert.equal(html("\\(x\\) and \\[y\\]"), '<p><span class="math">x</span> and <span class="math display">y</span></p>');
});

test("prices are no formulas", () => {
  assert.equal(html("$5 and $10"), "<p>$5 and $10</p>");
  assert.equal(inlineMath("$ x $"), null);
  assert.equal(inlineMath("$x"), null);
  assert.equal(blockMath("text $$x$$"), null);
});

test("a dollar sign in code is no formula", () => {
  assert.equal(html("`$x$` costs"), "<p><code>$x$</code> costs</p>");
});

test("prose that has nothing to interpret may simply be added to", () => {
  const [story] = blocksOf("Once upon a time, there was a boy");
  assert.ok(isProse(story));
  assert.ok(!isProse(blocksOf("- item one of the list")[0]));
  assert.ok(!isProse(blocksOf("Once *upon* a time there was")[0]));
  assert.ok(!isProse(blocksOf("1")[0]), "it may become a list");
  assert.ok(isLiteral(' named Timmy. "Hello!" (he said) - and # 5'));
  for (const text of ["\n", "*", "_a", "`", "[", "<", "&", "$", "https://x", "www.x", "a@b.c", "\\"]) assert.ok(!isLiteral(text), text);
});

test("adding literal text to prose changes nothing but its end", () => {
  const start = "Once upon a time, there was a boy";
  for (const more of [' named Timmy. "Hello!" he said.', " - and # 5", " (very) tall, 3. or 4) of + = | ~"]) {
    if (!isLiteral(more)) continue;
    const shown = (start + more).replaceAll('"', "&quot;");
    assert.equal(html(start + more), `<p>${shown}</p>`);
  }
});
