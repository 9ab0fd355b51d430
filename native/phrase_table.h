/* Internal: the dictionary of phrases and its index. */
#ifndef MLXZIP_PHRASE_TABLE_H
#define MLXZIP_PHRASE_TABLE_H

#include "phrases.h"
#include "table.h"

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

enum { AHEAD = 12 }; /* a cell is prefetched so many units before it is read, so that it has arrived by then */
#define NO_ID ((uint32_t)MLXZIP_NO_ID)

/* A cell of the index is 0, or slot + 1 in its lower bits and the top of the hash above. At most half the cells are
 * used. */
struct mlxzip_phrases {
  mlxzip_phrases_spec spec;
  uint32_t *cells, *rows, *uses; /* a row: prefix, last unit */
  uint32_t *ids;                 /* NULL: all ids follow from first_id */
  uint32_t *inner;               /* one bit per node: 1 if a longer run begins with it */
  size_t mask, n, cap;
  unsigned bits;
  uint32_t open, depth; /* the run at the end of the units trained so far, if depth > 0 */
};

/* Returns a hash that differs for any two runs. */
static inline uint64_t hash_of(uint32_t prefix, uint32_t unit) { return mlxzip_hash((uint64_t)prefix << 32, unit); }

static inline uint32_t cell_of(const mlxzip_phrases *p, uint64_t hash, size_t slot) {
  return (uint32_t)(hash >> (32 + p->bits) << p->bits) | (uint32_t)(slot + 1);
}

static inline size_t slot_of(const mlxzip_phrases *p, uint32_t cell) {
  return (cell & (((uint32_t)1 << p->bits) - 1)) - 1;
}

/* Returns the cell of a run, or the empty cell where it belongs. */
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

/* Returns whether ends rise and none exceeds n. */
bool mlxzip_samples_ordered(const mlxzip_samples *s);
/* Returns whether every unit is below `units` or has_unk is set; else *bad is the index of the first unknown unit. */
bool mlxzip_units_known(const mlxzip_phrases *p, const mlxzip_samples *s, size_t *bad);

#endif
