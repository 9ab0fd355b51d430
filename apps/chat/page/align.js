// Which token wrote which character on the screen. Pure: no DOM.
//
// A message's text is the concatenation of its tokens' texts. Markdown shows most of that text and drops some (`**`, `[](…)`).
// `align` gives every shown character its place in the text; `runs` cuts shown text where one token ends and the next begins.

const REACH = 2000; // characters of markup that may lie between two shown characters, for example a link's address

/**
 * Returns for each piece of shown text an Int32Array: the index in `source` of each of its characters.
 * A shown character that `source` does not have (a decoded `&lt;`) gets the index of the next character that it does have.
 */
export function align(source, pieces) {
  let at = 0;
  return pieces.map((piece) => {
    const places = new Int32Array(piece.length);
    for (let i = 0; i < piece.length; i++) {
      if (!same(source[at], piece[i])) at = next(source, at, piece, i);
      places[i] = at;
      if (same(source[at], piece[i])) at++;
    }
    return places;
  });
}

function same(a, b) {
  return a === b || (isSpace(a) && isSpace(b));
}

function isSpace(character) {
  return character === " " || character === "\n" || character === "\t" || character === "\u00a0";
}

/** Returns where `piece` goes on in `source`: the longer the matching text, the further ahead it may lie. */
function next(source, at, piece, i) {
  for (const length of [12, 4, 1]) {
    const wanted = piece.slice(i, i + length);
    const found = source.indexOf(wanted, at);
    const reach = length === 1 ? 8 : REACH;
    if (found >= 0 && found - at <= reach) return found;
  }
  return at;
}

/** Returns the end offsets of tokens in the text that they concatenate to, continuing after `from` characters. */
export function endsOf(tokens, from = 0) {
  const ends = [];
  for (const token of tokens) ends.push((from += token.t.length));
  return ends;
}

/** Returns the index of the token that holds character `place`; `ends.length` if none does. Binary search. */
export function tokenAt(ends, place) {
  let low = 0;
  let high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > place) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * Returns [{start, end, token}]: stretches of one shown piece whose characters belong to the same token.
 * places: from `align`, for that piece. ends: end offsets of the tokens. offset: where the aligned source begins in the text.
 */
export function runs(places, ends, offset = 0) {
  const found = [];
  let start = 0;
  while (start < places.length) {
    const token = tokenAt(ends, places[start] + offset);
    const from = (token ? ends[token - 1] : 0) - offset;
    const to = (token < ends.length ? ends[token] : Infinity) - offset;
    let end = start + 1;
    while (end < places.length && places[end] >= from && places[end] < to) end++;
    found.push({ start, end, token });
    start = end;
  }
  return found;
}
