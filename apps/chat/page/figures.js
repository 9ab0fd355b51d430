// Figures and times as people read them. Pure: no DOM.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // made once: making one costs more than its use
const UNITS = ["bytes", "kB", "MB", "GB", "TB"];

/** Returns a whole number with thousands separators: 12,345. Nothing known: an en dash. */
export function count(number) {
  return Number.isFinite(number) ? WHOLE.format(Math.round(number)) : "–";
}

/** Returns a number with about three digits: 1,234, 123, 12.3, 1.23. */
export function short(number) {
  if (!Number.isFinite(number)) return "–";
  const digits = Math.abs(number) >= 100 ? 0 : Math.abs(number) >= 10 ? 1 : 2;
  return number.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Returns a number of bytes in decimal units, as the Finder does: 3.2 MB. */
export function bytes(number) {
  if (!Number.isFinite(number)) return "–";
  let unit = 0;
  while (Math.abs(number) >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit++;
  }
  return `${unit ? number.toFixed(number < 99.95 ? 1 : 0) : Math.round(number)} ${UNITS[unit]}`;
}

/** Returns a duration in seconds as a clock shows it: 3.4 s, 1:05. */
export function clock(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}

/** Returns a fraction between 0 and 1 in whole percent, kept within 0% and 100%. */
export function percent(fraction) {
  return `${Math.round(100 * bounded(fraction))}%`;
}

/** Returns a fraction kept between 0 and 1; 0 for what is no number. */
export function bounded(fraction) {
  return Number.isFinite(fraction) ? Math.min(1, Math.max(0, fraction)) : 0;
}

/** Returns how many steps an answer's hypertokens saved: base tokens less steps, never negative. */
export function stepsSaved(figures) {
  return Math.max(0, (figures?.base_tokens ?? 0) - (figures?.steps ?? 0));
}

/** Returns how many passes of the model an answer took: one per step, but none for an accepted id of a draft. */
export function passes(figures) {
  return (figures?.steps ?? 0) - (figures?.accepted ?? 0);
}

/** Returns the figures of several answers' drafts together: {base_tokens, steps, proposed, accepted}. */
export function draftFigures(answers) {
  const sum = (name) => answers.reduce((total, figures) => total + (figures?.[name] ?? 0), 0);
  return Object.fromEntries(["base_tokens", "steps", "proposed", "accepted"].map((name) => [name, sum(name)]));
}

/** Returns what drafts did, for example "40 of 52 drafted ids accepted (77%) · 12 wasted · 3.35 base tokens per pass". */
export function drafts({ base_tokens, steps, proposed, accepted }) {
  if (!proposed) return "";
  const share = `${count(accepted)} of ${count(proposed)} drafted ids accepted (${percent(accepted / proposed)})`;
  return `${share} · ${count(proposed - accepted)} wasted · ${short(base_tokens / passes({ steps, accepted }))} base tokens per pass`;
}

/** Returns one line under an answer, for example "201 base tokens in 100 steps · 2.01 per step · 187 base tokens/s". */
export function summary(figures) {
  if (!figures?.base_tokens) return "";
  const parts = [`${plural(figures.base_tokens, "base token")} in ${plural(figures.steps, "step")}`];
  if (figures.base_tokens_per_step > 1.005) parts.push(`${figures.base_tokens_per_step.toFixed(2)} per step`);
  if (figures.accepted) parts.push(`${short(figures.base_tokens / passes(figures))} per pass`);
  if (figures.base_tokens_per_s) parts.push(`${short(figures.base_tokens_per_s)} base tokens/s`);
  return parts.join(" · ");
}

/** Returns where an answer's prompt differs from what was kept of earlier ones, and how; null if it goes on from it. */
export function difference(figures) {
  const found = figures?.prompt_differs;
  if (!found) return null;
  const how = `The prompt goes on with “${found.now}” there, what was kept with “${found.kept}”.`;
  return [`read again from base token ${count(found.at)} on`, `${how} Letters are shown as x, digits as 0.`];
}

/** Returns "1 token", "2 tokens". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Returns milliseconds since 1970 of a time given as seconds, milliseconds or ISO text; NaN if it is none of them. */
export function milliseconds(time) {
  if (typeof time === "number") return time < 1e11 ? 1000 * time : time;
  return Date.parse(time);
}

/** Returns the heading that a conversation stands under: Today, Yesterday, Previous 7 days, Previous 30 days or Older. */
export function period(time, now = Date.now()) {
  const days = Math.round((midnight(now) - midnight(milliseconds(time))) / 86400000);
  if (!(days > 0)) return "Today";
  if (days === 1) return "Yesterday";
  return days <= 7 ? "Previous 7 days" : days <= 30 ? "Previous 30 days" : "Older";
}

function midnight(time) {
  return new Date(time).setHours(0, 0, 0, 0);
}

/** Returns a time as a list shows it: the hour today, the weekday in the last week, else the date. */
export function when(time, now = Date.now()) {
  const date = new Date(milliseconds(time));
  if (Number.isNaN(date.getTime())) return "";
  const under = period(time, now);
  if (under === "Today") return date.toLocaleTimeString([], { hour: "numeric", minute: "2-digit" });
  if (under === "Yesterday") return "Yesterday";
  if (under === "Previous 7 days") return date.toLocaleDateString([], { weekday: "long" });
  return date.toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}
