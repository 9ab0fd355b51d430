/* Property: a row that was written is found; and after any change to the file's bytes, truncation or forgery, a row
 * that is found is the right one. Rows are functions of their keys here, so a wrong one is noticed. */
#define _POSIX_C_SOURCE 200809L /* pwrite, ftruncate, fileno */

#include "fuzz.h"

#include <unistd.h>

#include "../rows.h"

enum { KEYS = 48, MOST_WORDS = 4, MOST_BYTES = 40 };

typedef struct {
  mlxzip_rows_shape shape;
  int file;
  uint8_t *map; /* header and cells, as a process has them mapped */
  size_t map_bytes, n;
  uint32_t keys[KEYS * MOST_WORDS];
} store;

static void row_of(const mlxzip_rows_shape *s, const uint32_t *key, uint8_t *row) {
  uint32_t mixed = 1;
  for (size_t i = 0; i < s->key_words; i++) mixed = (mixed ^ key[i]) * 2654435761u;
  for (size_t i = 0; i < s->row_bytes; i++) row[i] = (uint8_t)((mixed = mixed * 1664525u + 1013904223u) >> 24);
}

/* Returns how many of the keys are found; checks that each has its own row. */
static size_t found_of(const store *f) {
  const mlxzip_rows_shape *s = &f->shape;
  size_t n = 0;
  uint8_t *rows = malloc(f->n * s->row_bytes + 1), *found = calloc(f->n + 1, 1), row[MOST_BYTES];
  uint8_t *scratch = malloc(mlxzip_rows_stride(s));
  REQUIRE(rows && found && scratch);
  size_t damaged = mlxzip_rows_find(s, f->map, f->file, f->keys, f->n, found, rows, scratch);
  for (size_t i = 0; i < f->n; i++) {
    if (!found[i]) continue;
    n++;
    row_of(s, f->keys + i * s->key_words, row);
    REQUIRE(!memcmp(row, rows + i * s->row_bytes, s->row_bytes));
  }
  REQUIRE(n + damaged <= f->n);
  free(rows), free(found), free(scratch);
  return n;
}

/* Adds the row of a key if there is room; returns whether there was. */
static int put(store *f, const uint32_t *key) {
  const mlxzip_rows_shape *s = &f->shape;
  size_t stride = mlxzip_rows_stride(s);
  uint8_t row[MOST_BYTES], *record = malloc(stride);
  uint64_t value;
  REQUIRE(record);
  row_of(s, key, row);
  mlxzip_rows_seal(s, key, row, 1, record);
  size_t cell = mlxzip_rows_cell(s, f->map, key, (uint32_t)f->n, &value);
  REQUIRE(cell <= s->cells);
  if (cell < s->cells) {
    REQUIRE(pwrite(f->file, record, stride, (off_t)(f->map_bytes + f->n * stride)) == (ssize_t)stride);
    memcpy(f->map + MLXZIP_ROWS_HEADER + 8 * cell, &value, 8);
    memcpy(f->keys + f->n++ * s->key_words, key, 4 * (size_t)s->key_words);
  }
  free(record);
  return cell < s->cells;
}

/* Puts another key's record where this one's is, sealed as if its keys had one hash. */
static void forge(store *f, size_t i) {
  const mlxzip_rows_shape *s = &f->shape;
  size_t stride = mlxzip_rows_stride(s);
  const uint32_t *own = f->keys + i * s->key_words, *key = f->keys + (i + 1) % f->n * s->key_words;
  uint8_t row[MOST_BYTES], *record = malloc(stride);
  REQUIRE(record);
  row_of(s, key, row);
  mlxzip_rows_seal(s, own, row, 1, record);
  memcpy(record, key, 4 * (size_t)s->key_words);
  REQUIRE(pwrite(f->file, record, stride, (off_t)(f->map_bytes + i * stride)) == (ssize_t)stride);
  free(record);
}

static void damage(store *f, bytes *b) {
  size_t size = f->map_bytes + f->n * mlxzip_rows_stride(&f->shape);
  uint32_t how = draw(b, 5);
  if (how == 4 && f->n > 1) {
    forge(f, draw(b, (uint32_t)f->n));
    return;
  }
  size_t at = ((size_t)draw(b, 256) << 8 | draw(b, 256)) % (size - MLXZIP_ROWS_HEADER) + MLXZIP_ROWS_HEADER;
  uint8_t byte = (uint8_t)draw(b, 256);
  if (how == 0) {
    REQUIRE(ftruncate(f->file, (off_t)at) == 0);
  } else if (at < f->map_bytes) {
    f->map[at] = byte;
  } else {
    REQUIRE(pwrite(f->file, &byte, 1, (off_t)at) == 1);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static FILE *temporary;
  if (!temporary) temporary = tmpfile();
  REQUIRE(temporary);
  bytes b = {data, size};
  store f = {.file = fileno(temporary)};
  f.shape.key_words = 1 + draw(&b, MOST_WORDS), f.shape.row_bytes = 1 + draw(&b, MOST_BYTES);
  f.shape.cells = 1u << draw(&b, 7);
  f.map_bytes = MLXZIP_ROWS_HEADER + 8 * (size_t)f.shape.cells;
  f.map = calloc(1, f.map_bytes);
  REQUIRE(f.map && ftruncate(f.file, 0) == 0);
  for (size_t wanted = draw(&b, KEYS); f.n < wanted && b.left > size / 4;) {
    uint32_t key[MOST_WORDS];
    for (size_t i = 0; i < f.shape.key_words; i++) key[i] = draw(&b, 256);
    if (!put(&f, key)) break;
  }
  REQUIRE(found_of(&f) == f.n);
  while (b.left) damage(&f, &b);
  found_of(&f);
  free(f.map);
  return 0;
}
