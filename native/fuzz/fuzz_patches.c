/* Property: for any tokens, the learned merges are valid, and patches made with them fit, spell their tokens and have
 * one mark, at the end. For any merges, encoding spells the tokens or returns an error. */
#include "fuzz.h"

#include "../patches.h"

enum { TOKENS = 24, ROOM = 2100 };

typedef struct {
  uint8_t data[ROOM];
  size_t offsets[TOKENS + 1], n;
} tokens;

static void draw_tokens(bytes *b, tokens *t) {
  uint32_t alphabet = 1 + draw(b, 4);
  t->n = draw(b, TOKENS), t->offsets[0] = 0;
  for (size_t i = 0; i < t->n; i++) {
    size_t length = draw(b, 20), at = t->offsets[i];
    if (draw(b, 16) == 0) length *= 4;
    for (size_t k = 0; k < length; k++) t->data[at + k] = (uint8_t)('a' + draw(b, alphabet));
    t->offsets[i + 1] = at + length;
  }
}

/* Checks that the bytes at `at` are the symbol's; returns where they end. */
static size_t spell(const mlxzip_merge *merges, uint16_t symbol, const uint8_t *data, size_t at, size_t end) {
  if (symbol > MLXZIP_MARK) {
    at = spell(merges, merges[symbol - MLXZIP_MARK - 1].left, data, at, end);
    return spell(merges, merges[symbol - MLXZIP_MARK - 1].right, data, at, end);
  }
  REQUIRE(symbol < MLXZIP_MARK && at < end && data[at] == symbol);
  return at + 1;
}

/* Encodes all tokens and reads them back; returns the longest patch's length, or 0 if the merges were refused. */
static size_t longest(const mlxzip_merge *merges, size_t n_merges, size_t size, const tokens *t) {
  uint16_t *dst = malloc((t->offsets[t->n] + t->n + 1) * sizeof *dst);
  uint32_t lengths[TOKENS] = {0};
  size_t bad, most = 0;
  REQUIRE(dst);
  mlxzip_status status = mlxzip_patches_encode(merges, n_merges, size, t->data, t->offsets, t->n, dst, lengths, &bad);
  REQUIRE(status == MLXZIP_OK || (status == MLXZIP_E_MERGE && bad < n_merges));
  for (size_t i = 0; status == MLXZIP_OK && i < t->n; i++) {
    const uint16_t *s = dst + t->offsets[i] + i;
    size_t at = t->offsets[i], end = t->offsets[i + 1];
    for (size_t k = 0; k + 1 < lengths[i]; k++) at = spell(merges, s[k], t->data, at, end);
    REQUIRE(at == end && s[lengths[i] - 1] == MLXZIP_MARK);
    if (lengths[i] > most) most = lengths[i];
  }
  free(dst);
  return status == MLXZIP_OK ? most : 0;
}

static void learn(const tokens *t, size_t size) {
  size_t cap = t->offsets[t->n], n, gone = 0, pool = 0;
  mlxzip_merge *merges = malloc((cap + 1) * sizeof *merges);
  uint32_t *counts = malloc((cap + 1) * sizeof *counts), *left = malloc((cap + 1) * sizeof *left);
  REQUIRE(merges && counts && left);
  mlxzip_status status = mlxzip_patches_learn(t->data, t->offsets, t->n, size, merges, counts, left, cap, &n);
  if (size < 2) {
    REQUIRE(status == MLXZIP_E_ARG);
  } else {
    REQUIRE(status == MLXZIP_OK && longest(merges, n, size, t) <= size && longest(merges, n, 0, t) <= size);
    for (size_t i = 0; i < t->n; i++) pool += t->offsets[i + 1] - t->offsets[i] + 1 > size;
    for (size_t k = 0; k < n; gone += left[k++]) REQUIRE(counts[k] > 0);
    REQUIRE(gone == pool);
    if (n) {
      status = mlxzip_patches_learn(t->data, t->offsets, t->n, size, merges, counts, left, n - 1, &n);
      REQUIRE(status == MLXZIP_E_SPACE);
    }
  }
  free(merges), free(counts), free(left);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static tokens t;
  bytes b = {data, size};
  size_t patch = draw(&b, 12);
  draw_tokens(&b, &t);
  learn(&t, patch);
  mlxzip_merge merges[16];
  size_t n = draw(&b, 16);
  for (size_t k = 0; k < n; k++) {
    uint32_t left = draw(&b, 8), right = draw(&b, 8); /* letters, the mark, what was made and what was not yet */
    merges[k].left = (uint16_t)(left < 4 ? 'a' + left : 256 + (left - 4) * (k + 1) / 3);
    merges[k].right = (uint16_t)(right < 4 ? 'a' + right : 256 + (right - 4) * (k + 1) / 3);
  }
  longest(merges, n, patch, &t);
  return 0;
}
