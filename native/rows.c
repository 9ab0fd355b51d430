#define _POSIX_C_SOURCE 200809L /* pread */

#include "rows.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "table.h"

enum { LANES = 4 };

static const uint64_t SEED = 0x2545F4914F6CDD1Du, FACTOR = 0xD6E8FEB86659FD93u;

static size_t whole(size_t bytes) { return (bytes + 7) / 8 * 8; }

static size_t row_at(const mlxzip_rows_shape *s) { return whole(4 * (size_t)s->key_words); }

size_t mlxzip_rows_stride(const mlxzip_rows_shape *s) { return row_at(s) + whole(s->row_bytes) + 8; }

static size_t records_at(const mlxzip_rows_shape *s) { return MLXZIP_ROWS_HEADER + 8 * (size_t)s->cells; }

/* Bijective in each argument, so that inputs that differ in one word give different results. */
static uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * FACTOR;
  return h ^ (h >> 32);
}

/* Returns the checksum of a row and its key's hash, never 0. Four lanes let the multiplications overlap. */
static uint64_t checksum(uint64_t key_hash, const uint8_t *row, size_t bytes) {
  uint64_t lane[LANES], word[LANES];
  for (size_t k = 0; k < LANES; k++) lane[k] = mix(SEED + k, key_hash);
  size_t at = 0;
  for (; at + sizeof word <= bytes; at += sizeof word) {
    memcpy(word, row + at, sizeof word);
    for (size_t k = 0; k < LANES; k++) lane[k] = mix(lane[k], word[k]);
  }
  memset(word, 0, sizeof word);
  memcpy(word, row + at, bytes - at);
  for (size_t k = 0; k < LANES; k++) lane[k] = mix(lane[k], word[k]);
  uint64_t sum = mix(SEED, bytes);
  for (size_t k = 0; k < LANES; k++) sum = mix(sum, lane[k]);
  return sum ? sum : SEED;
}

void mlxzip_rows_seal(const mlxzip_rows_shape *s, const uint32_t *keys, const uint8_t *rows, size_t n, uint8_t *dst) {
  size_t stride = mlxzip_rows_stride(s);
  memset(dst, 0, n * stride);
  for (size_t i = 0; i < n; i++, keys += s->key_words, rows += s->row_bytes, dst += stride) {
    uint64_t sum = checksum(mlxzip_hash_run(keys, s->key_words), rows, s->row_bytes);
    memcpy(dst, keys, 4 * (size_t)s->key_words);
    memcpy(dst + row_at(s), rows, s->row_bytes);
    memcpy(dst + stride - 8, &sum, 8);
  }
}

static uint64_t cell(const mlxzip_rows_shape *s, const uint8_t *map, uint64_t hash, size_t probe) {
  size_t i = (size_t)(hash + probe) & (s->cells - 1);
  const _Atomic uint64_t *cells = (const _Atomic uint64_t *)(const void *)(map + MLXZIP_ROWS_HEADER);
  return atomic_load_explicit(&cells[i], memory_order_acquire);
}

static bool read_all(int file, uint8_t *dst, size_t n, uint64_t at) {
  while (n > 0) {
    ssize_t got = pread(file, dst, n, (off_t)at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    dst += got, n -= (size_t)got, at += (uint64_t)got;
  }
  return true;
}

/* Returns whether `record` holds this key; if so, its row is in `dst`. */
static bool read_record(const mlxzip_rows_shape *s, int file, uint64_t record, uint64_t hash, const uint32_t *key,
                        uint8_t *dst) {
  size_t stride = mlxzip_rows_stride(s);
  if (!read_all(file, dst, stride, records_at(s) + record * stride)) return false;
  uint64_t sum;
  memcpy(&sum, dst + stride - 8, 8);
  return memcmp(dst, key, 4 * (size_t)s->key_words) == 0 && sum == checksum(hash, dst + row_at(s), s->row_bytes);
}

typedef enum { ABSENT, DAMAGED, FOUND } result;

static result find(const mlxzip_rows_shape *s, const uint8_t *map, int file, const uint32_t *key, uint8_t *dst) {
  uint64_t hash = mlxzip_hash_run(key, s->key_words);
  result found = ABSENT;
  for (size_t probe = 0; probe < MLXZIP_ROWS_PROBES; probe++) {
    uint64_t value = cell(s, map, hash, probe);
    if (value == 0) break;
    if ((value ^ hash) >> 32 != 0 || (uint32_t)value == 0) continue;
    if (read_record(s, file, (uint32_t)value - 1, hash, key, dst)) return FOUND;
    found = DAMAGED; /* unless a later cell has a newer record */
  }
  return found;
}

size_t mlxzip_rows_find(const mlxzip_rows_shape *s, const uint8_t *map, int file, const uint32_t *keys, size_t n,
                        uint8_t *found, uint8_t *rows, uint8_t *scratch) {
  size_t damaged = 0;
  for (size_t i = 0; i < n; i++) {
    result one = found[i] ? ABSENT : find(s, map, file, keys + i * s->key_words, scratch);
    damaged += one == DAMAGED;
    if (one != FOUND) continue;
    memcpy(rows + i * s->row_bytes, scratch + row_at(s), s->row_bytes);
    found[i] = 1;
  }
  return damaged;
}

size_t mlxzip_rows_cell(const mlxzip_rows_shape *s, const uint8_t *map, const uint32_t *key, uint32_t record,
                        uint64_t *value) {
  uint64_t hash = mlxzip_hash_run(key, s->key_words);
  *value = hash >> 32 << 32 | ((uint64_t)record + 1);
  for (size_t probe = 0; probe < MLXZIP_ROWS_PROBES && probe < s->cells; probe++)
    if (cell(s, map, hash, probe) == 0) return (size_t)(hash + probe) & (s->cells - 1);
  return s->cells;
}
