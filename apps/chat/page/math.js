// Formulas in Markdown: $…$, $$…$$, \(…\), \[…\]. Pure: no DOM.
//
// A dollar sign opens a formula if no space follows it, and closes one if no space precedes it and no digit follows it:
// "$5 and $10" stays text.

const INLINE = [/^\$\$(?!\$)([^]+?)\$\$/, /^\$(?![\s$])((?:\\[^]|[^\\$\n])*?[^\\\s$]|[^\\\s$])\$(?!\d)/, /^\\\(([^]+?)\\\)/, /^\\\[([^]+?)\\\]/];
const BLOCK = /^ {0,3}(?:\$\$(?!\$)([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/;

/** Returns {raw, tex, display} of the formula that text begins with, inside a paragraph; null if it begins with none. */
export function inlineMath(text) {
  for (const [index, rule] of INLINE.entries()) {
    const match = rule.exec(text);
    if (match) return { raw: match[0], tex: match[1].trim(), display: index === 0 || index === 3 };
  }
  return null;
}

/** Returns {raw, tex, display} of the formula that stands alone on the lines text begins with, else null. */
export function blockMath(text) {
  const match = BLOCK.exec(text);
  return match && { raw: match[0], tex: (match[1] ?? match[2]).trim(), display: true };
}

/** Returns where the next formula may begin, undefined for nowhere. */
export function mathStart(text) {
  const at = text.search(/\$|\\\(|\\\[/);
  return at < 0 ? undefined : at;
}
