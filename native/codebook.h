/* Internal: the running codebook. */
#ifndef MLXZIP_CODEBOOK_H
#define MLXZIP_CODEBOOK_H

#include "table.h"

/* State after each logged id, in one word: base length (38 bits), entries (21), length of prev (5). prev itself needs
 * no copy: it is always the end of the expanded log. */
enum { PREV_BITS = 5, ENTRY_BITS = 21, LENGTH_SHIFT = PREV_BITS + ENTRY_BITS };
#define MLXZIP_MAX_LOG (SIZE_MAX >> 30 < 4 ? SIZE_MAX / 64 : (size_t)1 << 30 << 4)

/* 1..merge_size base ids, or none: those of a padded row, but for the first, which stands apart. Thus all base ids
 * share one row, and no row is read whole right after one id of it was written, which makes a processor wait. */
typedef struct {
  const uint32_t *row;
  uint64_t hash;
  uint32_t first, n;
} mlxzip_run;

struct mlxzip_codebook {
  const mlxzip_params *params;
  mlxzip_table table;
  uint32_t *log;
  uint64_t *after;
  size_t n, cap; /* of log and after */
  uint64_t base_length;
  size_t n_prev;
  uint64_t prev_hash;
  uint32_t own[MLXZIP_MAX_MERGE]; /* prev between calls, padded like a row so that it can be installed as it stands */
};

/* State after the first `mark` ids, but for prev. */
static inline uint64_t mlxzip_after(const mlxzip_codebook *b, size_t mark) {
  return mark ? b->after[mark - 1] : (uint64_t)b->params->start.n << PREV_BITS;
}

static inline size_t mlxzip_entries_in(uint64_t after) {
  return after >> PREV_BITS & (((size_t)1 << ENTRY_BITS) - 1);
}

#endif
