/* Internal: the running codebook. */
#ifndef MLXZIP_CODEBOOK_H
#define MLXZIP_CODEBOOK_H

#include "turns.h"

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
  mlxzip_turns *turns; /* where entries take turns, from the first push on; else NULL */
  uint32_t *log;
  uint64_t *after;
  size_t n, cap; /* of log and after */
  uint64_t base_length;
  size_t n_prev;
  uint64_t prev_hash;
  uint32_t own[MLXZIP_MAX_MERGE]; /* prev between calls, padded like a row so that it can be installed as it stands */
};

/* `mlxzip_continue` that stays where it got to. */
mlxzip_status mlxzip_go_on(mlxzip_codebook *b, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                           size_t *bad);

/* State after the first `mark` ids, but for prev. */
static inline uint64_t mlxzip_after(const mlxzip_codebook *b, size_t mark) {
  return mark ? b->after[mark - 1] : (uint64_t)b->params->start.n << PREV_BITS;
}

static inline size_t mlxzip_entries_in(uint64_t after) {
  return after >> PREV_BITS & (((size_t)1 << ENTRY_BITS) - 1);
}

/* The base ids that logged id number i stood for when it was read. */
static inline const uint32_t *mlxzip_logged_run(const mlxzip_codebook *b, size_t i, size_t *n) {
  const mlxzip_params *p = b->params;
  const uint32_t *id = b->log + i;
  uint32_t entry = *id - p->vocab_size;
  *n = 1;
  if (*id < p->vocab_size || mlxzip_disabled(p, *id)) return id;
  if (b->turns) return mlxzip_turns_row(b->turns, p, b->turns->steps[i].entry, n);
  *n = b->table.lengths[entry];
  return b->table.rows + (size_t)entry * p->merge_size;
}

#endif
