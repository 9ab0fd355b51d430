/* Internal: parameters, and the table that finds entries by their base ids. A prefix of an entry need not be an entry.
 * */
#ifndef MLXZIP_TABLE_H
#define MLXZIP_TABLE_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "mlxzip.h"

/* Entries by slot, and an open-addressing index: a cell is 0, or slot + 1 in its lower bits and the top bits of the
 * hash above. At most a quarter of the cells are used, or half in a large table. Under FREEZE entries are removed only
 * in the reverse order of installation, so clearing a cell never breaks a probe chain. Under the other policies turns.c
 * closes the gap in the chain. */
typedef struct {
  uint32_t *cells;
  size_t mask;
  uint32_t *rows; /* merge_size ids per slot, padded */
  uint8_t *lengths;
  uint64_t *hashes; /* of the entries; not stored while compressing */
  size_t n, cap;
  void *block; /* memory of the arrays, if the table owns them */
} mlxzip_table;

struct mlxzip_params {
  uint32_t vocab_size, codebook_size, merge_size, has_pad, pad_id, policy, fill;
  bool clash;  /* some disabled id is also the id of a slot */
  bool closed; /* every prefix of a start entry is a start entry */
  bool turns;  /* policy LRU or USE_COUNT */
  size_t n_disabled, filter_mask;
  uint32_t *disabled; /* rising */
  uint64_t *filter;   /* one bit per disabled id modulo its size: a zero bit means "not disabled" */
  mlxzip_table start;
};

static inline uint64_t mlxzip_hash(uint64_t h, uint32_t id) {
  h = (h ^ id) * 0x9E3779B97F4A7C15u;
  return h ^ (h >> 32);
}

static inline uint64_t mlxzip_hash_run(const uint32_t *ids, size_t n) {
  uint64_t h = 0;
  for (size_t i = 0; i < n; i++) h = mlxzip_hash(h, ids[i]);
  return h;
}

static inline bool mlxzip_same(const uint32_t *a, const uint32_t *b, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (a[i] != b[i]) return false;
  return true;
}

enum { SLOT_BITS = 21 };

static inline uint32_t mlxzip_cell(uint64_t hash, size_t slot) {
  return (uint32_t)(hash >> (32 + SLOT_BITS) << SLOT_BITS) | (uint32_t)(slot + 1);
}

static inline size_t mlxzip_slot(uint32_t cell) { return (cell & (((uint32_t)1 << SLOT_BITS) - 1)) - 1; }

/* Returns the first cell of a run's probe chain that is empty or has its hash bits, without comparing the run. */
static inline uint32_t *mlxzip_probe(const mlxzip_table *t, size_t i, uint64_t hash) {
  for (i &= t->mask; t->cells[i] && (t->cells[i] ^ mlxzip_cell(hash, 0)) >> SLOT_BITS; i = (i + 1) & t->mask) {}
  return &t->cells[i];
}

/* Returns the cell of a run, or the empty cell where it belongs. */
static inline uint32_t *mlxzip_find(const mlxzip_table *t, size_t width, uint64_t hash, const uint32_t *ids, size_t n) {
  for (size_t i = hash;; i++) {
    uint32_t *cell = mlxzip_probe(t, i, hash);
    size_t slot = mlxzip_slot(*cell);
    if (!*cell || (t->lengths[slot] == n && mlxzip_same(t->rows + slot * width, ids, n))) return cell;
    i = (size_t)(cell - t->cells);
  }
}

static inline bool mlxzip_listed(const mlxzip_params *p, uint32_t id) {
  size_t low = 0, high = p->n_disabled;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (p->disabled[middle] < id) low = middle + 1;
    else high = middle;
  }
  return low < p->n_disabled && p->disabled[low] == id;
}

static inline bool mlxzip_disabled(const mlxzip_params *p, uint32_t id) {
  return (p->filter[(id >> 6) & p->filter_mask] >> (id & 63) & 1) && mlxzip_listed(p, id);
}

/* Returns whether an id is a base id that may merge. */
static inline bool mlxzip_plain(const mlxzip_params *p, uint32_t id) {
  return id < p->vocab_size && !mlxzip_disabled(p, id);
}

/* Returns the number of cells for cap entries. */
size_t mlxzip_cells(size_t cap);
/* Makes the array `cells`, of `size` cells, the table's index and adds all entries to it. hashes: one per entry. */
void mlxzip_index(mlxzip_table *t, uint32_t *cells, size_t size, const uint64_t *hashes);
/* Makes room for cap entries, at least doubling, in a table that owns its arrays. Returns false if there is no memory.
 * `rows` has MLXZIP_MAX_MERGE spare places at the end, so that any row can be copied in a piece of fixed size. Slot -1
 * exists too and stands for any base id: its hash is 0, its length 1, and its row a 0 followed by fill ids. */
bool mlxzip_grow(mlxzip_table *t, const mlxzip_params *p, size_t cap);
void mlxzip_table_free(mlxzip_table *t);

#endif
