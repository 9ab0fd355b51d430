import assert from "node:assert/strict";
import { test } from "node:test";

import * as figures from "../../../apps/chat/page/figures.js";

test("numbers have separators and about three digits", () => {
  assert.deepEqual([0.5, 9.876, 12.34, 187.4, 12345.6].map(figures.short), ["0.50", "9.88", "12.3", "187", "12,346"]);
  assert.deepEqual([figures.count(12345), figures.count(undefined), figures.short(NaN)], ["12,345", "–", "–"]);
});

test("bytes are in decimal units", () => {
  assert.deepEqual([0, 999, 1000, 922000, 3.21e6, 999.96e6, 2e13].map(figures.bytes), ["0 bytes", "999 bytes", "1.0 kB", "922 kB", "3.2 MB", "1.0 GB", "20.0 TB"]);
});

test("a clock shows tenths of a second, then minutes", () => {
  assert.deepEqual([0, 3.44, 59.9, 65, 600].map(figures.clock), ["0.0 s", "3.4 s", "59.9 s", "1:05", "10:00"]);
});

test("a share stays between nothing and all", () => {
  assert.deepEqual([-1, 0.256, 7, NaN, Infinity].map(figures.percent), ["0%", "26%", "100%", "0%", "0%"]);
});

test("where a prompt differs from what was kept is told in words, and nothing where it goes on", () => {
  const [where, how] = figures.difference({ prompt_differs: { at: 1234, kept: "xx 0", now: "xxx" } });
  assert.match(where, /base token 1,234 on/);
  assert.match(how, /“xxx”.*“xx 0”/);
  assert.deepEqual([null, {}, { prompt_differs: null }].map(figures.difference), [null, null, null]);
});

test("an answer is summed up in one line", () => {
  const whole = { base_tokens: 201, steps: 100, base_tokens_per_step: 2.01, base_tokens_per_s: 187.2 };
  assert.equal(figures.summary(whole), "201 base tokens in 100 steps · 2.01 per step · 187 base tokens/s");
  assert.equal(figures.summary({ base_tokens: 1, steps: 1, base_tokens_per_step: 1 }), "1 base token in 1 step");
  assert.equal(figures.summary(null), "");
  assert.equal(figures.stepsSaved(whole), 101);
  assert.equal(figures.stepsSaved(undefined), 0);
});

test("what drafts did is told in one line, over several answers, and nothing where there were none", () => {
  const drafted = { base_tokens: 201, steps: 100, proposed: 52, accepted: 40, base_tokens_per_step: 2.01 };
  assert.equal(figures.passes(drafted), 60);
  assert.match(figures.summary(drafted), / · 2\.01 per step · 3\.35 per pass$/);
  assert.equal(figures.drafts(drafted), "40 of 52 drafted ids accepted (77%) · 12 wasted · 3.35 base tokens per pass");
  const together = figures.draftFigures([drafted, null, { base_tokens: 10, steps: 10 }, { ...drafted, proposed: 48 }]);
  assert.deepEqual(together, { base_tokens: 412, steps: 210, proposed: 100, accepted: 80 });
  assert.equal(figures.drafts(figures.draftFigures([{ base_tokens: 10, steps: 10 }])), ""); // of a version without drafts
  assert.equal(figures.passes({ steps: 10 }), 10);
});

test("times are read as seconds, milliseconds or ISO text", () => {
  const time = Date.UTC(2026, 0, 2, 3, 4, 5);
  assert.deepEqual([time / 1000, time, "2026-01-02T03:04:05Z"].map(figures.milliseconds), [time, time, time]);
});

test("conversations stand under the day on which they were changed", () => {
  const now = new Date(2026, 4, 20, 12).getTime();
  const days = (number) => new Date(2026, 4, 20 - number, 23).getTime();
  const found = [0, 1, 2, 7, 8, 30, 31].map((number) => figures.period(days(number), now));
  const [week, month] = ["Previous 7 days", "Previous 30 days"];
  assert.deepEqual(found, ["Today", "Yesterday", week, week, month, month, "Older"]);
  assert.equal(figures.when(days(1), now), "Yesterday");
  assert.equal(figures.when("nothing", now), "");
});
