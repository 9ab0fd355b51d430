/* Internal: the dictionary of phrases, and how a run is found in it. */
#ifndef MLXZIP_PHRASE_TABLE_H
#define MLXZIP_PHRASE_TABLE_H

#include "phrases.h"
#include "table.h"

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

enum { AHEAD = 12 }; /* units: by then what is fetched has come */
#define NO_ID ((uint32_t)MLXZIP_NO_ID)

/* A cell of the index: 0, or slot + 1 in its lower bits, under the top of the hash. Half full at most. */
struct mlxzip_phrases {
  mlxzip_phrases_spec spec;
  uint32_t *cells, *rows, *uses; /* a row: prefix, last unit */
  uint32_t *ids;                 /* NULL where all follow from first_id */
  uint32_t *inner;               /* a bit per node: whether a longer run begins with it */
  size_t mask, n, cap;
  unsigned bits;
  uint32_t open, depth; /* the run at the end of what was trained, while depth > 0 */
};

/* No two runs have the same. */
static inline uint64_t hash_of(uint32_t prefix, uint32_t unit) { return mlxzip_hash((uint64_t)prefix << 32, unit); }

static inline uint32_t cell_of(const mlxzip_phrases *p, uint64_t hash, size_t slot) {
  return (uint32_t)(hash >> (32 + p->bits) << p->bits) | (uint32_t)(slot + 1);
}

static inline size_t slot_of(const mlxzip_phrases *p, uint32_t cell) {
  return (cell & (((uint32_t)1 << p->bits) - 1)) - 1;
}

/* The cell of this run, or the empty one where it belongs. */
static inline uint32_t *find(const mlxzip_phrases *p, uint32_t prefix, uint32_t unit) {
  uint64_t hash = hash_of(prefix, unit);
  uint32_t wanted = cell_of(p, hash, 0);
  for (size_t i = hash & p->mask;; i = (i + 1) & p->mask) {
    uint32_t *cell = &p->cells[i];
    if (!*cell) return cell;
    if ((*cell ^ wanted) >> p->bits) continue;
    const uint32_t *row = p->rows + 2 * slot_of(p, *cell);
    if (row[0] == prefix && row[1] == unit) return cell;
  }
}

static inline void fetch(const mlxzip_phrases *p, uint32_t prefix, uint32_t unit) {
  PREFETCH(&p->cells[hash_of(prefix, unit) & p->mask]);
}

/* Whether ends rise and none lies beyond n. */
bool mlxzip_samples_ordered(const mlxzip_samples *s);
/* Whether every unit is one, or an id stands for those that are none; else *bad is the place of the first. */
bool mlxzip_units_known(const mlxzip_phrases *p, const mlxzip_samples *s, size_t *bad);

#endif
