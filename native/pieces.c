#include "bpe.h"

#include <stdbool.h>

enum { OTHER, LETTER, NUMBER, SPACE };

#include "unicode_table.h"

typedef struct {
  uint32_t point, kind;
  size_t end; /* start of the next character */
} character;

static uint32_t kind_of_ascii(uint8_t c) {
  if ((uint8_t)((c | 32) - 'a') < 26) return LETTER;
  if ((uint8_t)(c - '0') < 10) return NUMBER;
  return c == ' ' || (uint8_t)(c - '\t') < 5 ? SPACE : OTHER;
}

static uint32_t kind_of(uint32_t point) {
  size_t low = 0, high = sizeof RANGES / sizeof *RANGES;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (RANGES[middle].last < point) low = middle + 1;
    else high = middle;
  }
  return low < sizeof RANGES / sizeof *RANGES && RANGES[low].first <= point ? RANGES[low].kind : OTHER;
}

/* Returns the length in bytes of a character that begins with this byte, 0 if none does. */
static size_t width_of(uint8_t lead) {
  return lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
}

static character beyond_ascii(const uint8_t *text, size_t n, size_t at) {
  character bad = {0xFFFD, OTHER, at + 1};
  size_t width = width_of(text[at]);
  if (width == 0 || width > n - at) return bad;
  uint32_t point = text[at] & (0xFFu >> (width + 1));
  for (size_t i = 1; i < width; i++) {
    if ((text[at + i] & 0xC0) != 0x80) return bad;
    point = point << 6 | (text[at + i] & 0x3F);
  }
  return (character){point, kind_of(point), at + width};
}

static inline character read(const uint8_t *text, size_t n, size_t at) {
  if (text[at] < 0x80) return (character){text[at], kind_of_ascii(text[at]), at + 1};
  return beyond_ascii(text, n, at);
}

/* Returns the end of the run of characters of one kind that begins at `at`, `most` characters at most. */
static inline size_t run(const uint8_t *text, size_t n, size_t at, uint32_t kind, size_t most) {
  for (; at < n && most > 0; most--) {
    character c = read(text, n, at);
    if (c.kind != kind) break;
    at = c.end;
  }
  return at;
}

static bool is_newline(uint32_t point) { return point == '\n' || point == '\r'; }

static uint8_t lower(uint8_t c, bool fold) { return fold && (uint8_t)(c - 'A') < 26 ? c | 32 : c; }

/* Returns the end of 's, 't, 're, 've, 'm, 'll or 'd whose apostrophe is at `at`, or `at` if there is none. fold: upper
 * case letters and the long s count too. */
static size_t contraction(const uint8_t *text, size_t n, size_t at, bool fold) {
  if (at + 1 == n) return at;
  uint8_t c = lower(text[at + 1], fold);
  if (c == 's' || c == 't' || c == 'm' || c == 'd') return at + 2;
  if (at + 2 == n) return at;
  uint8_t d = lower(text[at + 2], fold);
  if (((c == 'r' || c == 'v') && d == 'e') || (c == 'l' && d == 'l')) return at + 3;
  return fold && c == 0xC5 && d == 0xBF ? at + 3 : at;
}

/* Returns the end of the piece of white space that begins at `at`. With `lines` it ends after the last line break, if
 * there is one. Otherwise its last character is left to the next piece, if anything follows it. */
static size_t space(const uint8_t *text, size_t n, size_t at, bool lines) {
  size_t end = at, last = at, after_newline = at;
  while (end < n) {
    character c = read(text, n, end);
    if (c.kind != SPACE) break;
    last = end, end = c.end;
    if (is_newline(c.point)) after_newline = end;
  }
  if (lines && after_newline > at) return after_newline;
  return end < n && last > at ? last : end;
}

static size_t gpt2(const uint8_t *text, size_t n, size_t at) {
  if (text[at] == '\'') {
    size_t end = contraction(text, n, at, false);
    if (end > at) return end;
  }
  character c = read(text, n, at);
  if (c.point == ' ' && c.end < n) {
    character next = read(text, n, c.end);
    if (next.kind != SPACE) c = next;
  }
  return c.kind == SPACE ? space(text, n, at, false) : run(text, n, c.end, c.kind, SIZE_MAX);
}

static size_t cl100k(const uint8_t *text, size_t n, size_t at, size_t digits) {
  if (text[at] == '\'') {
    size_t end = contraction(text, n, at, true);
    if (end > at) return end;
  }
  character c = read(text, n, at);
  if (c.kind == LETTER) return run(text, n, c.end, LETTER, SIZE_MAX);
  if (c.kind == NUMBER) return run(text, n, c.end, NUMBER, digits - 1);
  character next = c.end < n ? read(text, n, c.end) : (character){.kind = SPACE};
  if (next.kind == LETTER && !is_newline(c.point)) return run(text, n, next.end, LETTER, SIZE_MAX);
  if (c.kind == SPACE && !(c.point == ' ' && next.kind == OTHER)) return space(text, n, at, true);
  size_t end = run(text, n, c.end, OTHER, SIZE_MAX);
  while (end < n && is_newline(text[end])) end++;
  return end;
}

size_t mlxzip_piece_end(int kind, const uint8_t *text, size_t n, size_t at) {
  switch (kind) {
    case MLXZIP_PIECE_GPT2: return gpt2(text, n, at);
    case MLXZIP_PIECE_CL100K: return cl100k(text, n, at, 3);
    case MLXZIP_PIECE_DIGITS: return cl100k(text, n, at, 1);
    default: return n;
  }
}

size_t mlxzip_pieces(int kind, const uint8_t *text, size_t n, size_t *ends) {
  size_t k = 0;
  for (size_t at = 0; at < n; k++) at = ends[k] = mlxzip_piece_end(kind, text, n, at);
  return k;
}
