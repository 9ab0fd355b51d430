/* What the fuzz targets share: parameters drawn from bytes, and a trap that no build option removes. */
#ifndef MLXZIP_FUZZ_H
#define MLXZIP_FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mlxzip.h"

#define REQUIRE(what) \
  do { \
    if (!(what)) fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what), abort(); \
  } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

typedef struct {
  const uint8_t *at;
  size_t left;
} bytes;

static inline uint32_t draw(bytes *b, uint32_t below) {
  if (b->left == 0) return 0;
  b->left--;
  return *b->at++ % below;
}

/* Small alphabets and small codebooks, so that entries recur, tables fill up and ids clash. NULL if refused. */
static inline mlxzip_params *draw_params(bytes *b) {
  uint32_t disabled[4], start[4 * MLXZIP_MAX_MERGE];
  uint8_t lengths[4];
  mlxzip_spec s = {.vocab_size = 1 + draw(b, 8), .merge_size = 1 + draw(b, MLXZIP_MAX_MERGE)};
  uint32_t size = draw(b, 256), extra = draw(b, 256);
  s.codebook_size = size < 200 ? size / 4 : size * 8;
  s.policy = (extra >> 6) % 3, s.has_pad = extra & 1, s.n_disabled = extra >> 1 & 3, s.n_start = extra >> 3 & 3;
  if (extra & 32) s.merge_size = 1 + s.merge_size % 4;
  s.pad_id = draw(b, 16), s.disabled = disabled, s.start = start, s.start_lengths = lengths;
  for (size_t i = 0; i < s.n_disabled; i++) disabled[i] = draw(b, 16);
  for (size_t i = 0; i < s.n_start; i++) {
    lengths[i] = (uint8_t)(2 + draw(b, 4));
    for (size_t k = 0; k < s.merge_size; k++) start[i * s.merge_size + k] = k < lengths[i] ? draw(b, 8) : 0;
  }
  mlxzip_params *p;
  mlxzip_status status = mlxzip_params_new(&s, &p);
  REQUIRE((status == MLXZIP_OK) == (p != NULL));
  return p;
}

/* The rest of the bytes as ids, each below `below`; never NULL. */
static inline uint32_t *draw_ids(bytes *b, uint32_t below, size_t *n) {
  *n = b->left;
  uint32_t *ids = malloc((*n + 1) * sizeof *ids);
  REQUIRE(ids);
  for (size_t i = 0; i < *n; i++) ids[i] = draw(b, below);
  return ids;
}

static inline uint8_t *saved(const mlxzip_codebook *book, size_t *n) {
  REQUIRE(mlxzip_to_bytes(book, NULL, 0, n) == MLXZIP_E_SPACE);
  uint8_t *data = malloc(*n);
  REQUIRE(data && mlxzip_to_bytes(book, data, *n, n) == MLXZIP_OK);
  return data;
}

/* Ids first.. of the log stood for exactly these base ids when they were read. */
static inline void require_text(const mlxzip_codebook *book, size_t first, size_t width, const uint32_t *ids, size_t n) {
  size_t n_log = mlxzip_mark(book) - first, at = 0;
  uint32_t *rows = malloc((n_log * width + 1) * sizeof *rows);
  uint8_t *lengths = malloc(n_log + 1);
  REQUIRE(rows && lengths && mlxzip_logged(book, first, n_log, rows, lengths) == MLXZIP_OK);
  for (size_t i = 0; i < n_log; i++) {
    REQUIRE(lengths[i] <= n - at && !memcmp(rows + i * width, ids + at, lengths[i] * sizeof *ids));
    at += lengths[i];
  }
  REQUIRE(at == n);
  free(rows), free(lengths);
}

/* All that can be seen of two codebooks is equal, and they go on alike. */
static inline void require_equal(mlxzip_codebook *a, mlxzip_codebook *b, size_t width) {
  size_t n = mlxzip_size(a), mark = mlxzip_mark(a), n_a, n_b;
  REQUIRE(n == mlxzip_size(b) && mark == mlxzip_mark(b) && mlxzip_base_length(a) == mlxzip_base_length(b));
  size_t block = (n + mark) * (width + 1) * sizeof(uint32_t) + n + 2 * mark; /* an id installs one entry at most */
  uint32_t *rows = malloc(block), *other = malloc(block);
  uint8_t *lengths = malloc(2 * n + 1);
  REQUIRE(rows && other && lengths);
  REQUIRE(mlxzip_entries(a, 0, n, rows, lengths) == MLXZIP_OK);
  REQUIRE(mlxzip_entries(b, 0, n, other, lengths + n) == MLXZIP_OK);
  REQUIRE(!memcmp(rows, other, n * width * sizeof *rows) && !memcmp(lengths, lengths + n, n));
  memset(rows, 0, block), memset(other, 0, block);
  REQUIRE(mlxzip_installed(a, mark, rows) == MLXZIP_OK && mlxzip_installed(b, mark, other) == MLXZIP_OK);
  REQUIRE(!memcmp(rows, other, block));
  memset(rows, 0, block), memset(other, 0, block);
  REQUIRE(mlxzip_logged(a, 0, mark, rows, NULL) == MLXZIP_OK && mlxzip_logged(b, 0, mark, other, NULL) == MLXZIP_OK);
  REQUIRE(!memcmp(rows, other, block));
  uint8_t *bytes_a = saved(a, &n_a), *bytes_b = saved(b, &n_b);
  REQUIRE(n_a == n_b && !memcmp(bytes_a, bytes_b, n_a));
  for (uint32_t id = 0; id < 8; id++) {
    uint32_t row_a[MLXZIP_MAX_MERGE + 2] = {0}, row_b[MLXZIP_MAX_MERGE + 2] = {0};
    REQUIRE(mlxzip_push_one(a, id, row_a) == mlxzip_push_one(b, id, row_b) && !memcmp(row_a, row_b, sizeof row_a));
  }
  REQUIRE(mlxzip_rewind(a, mark) == MLXZIP_OK && mlxzip_rewind(b, mark) == MLXZIP_OK);
  free(rows), free(other), free(lengths), free(bytes_a), free(bytes_b);
}

#endif
