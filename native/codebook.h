/* Internal: the codebook that follows a stream of ids. */
#ifndef MLXZIP_CODEBOOK_H
#define MLXZIP_CODEBOOK_H

#include "turns.h"

/* The state after each id of the log, in one word: base length (38 bits), number of entries (21), length of prev (5).
 * prev itself is not stored, because it is always the end of the expanded log. */
enum { PREV_BITS = 5, ENTRY_BITS = 21, LENGTH_SHIFT = PREV_BITS + ENTRY_BITS };
#define MLXZIP_MAX_LOG (SIZE_MAX >> 30 < 4 ? SIZE_MAX / 64 : (size_t)1 << 30 << 4)

/* A run of 0..merge_size base ids: a padded row whose first id is replaced by `first`. So all base ids share one row,
 * and no row is read as a whole right after one id of it was written, which would stall the processor. */
typedef struct {
  const uint32_t *row;
  uint64_t hash;
  uint32_t first, n;
} mlxzip_run;

struct mlxzip_codebook {
  const mlxzip_params *params;
  mlxzip_table table;
  mlxzip_turns *turns; /* under LRU and USE_COUNT, from the first push on; else NULL */
  uint32_t *log;
  uint64_t *after;
  size_t n, cap; /* of log and after */
  uint64_t base_length;
  size_t n_prev;
  uint64_t prev_hash;
  uint32_t own[MLXZIP_MAX_MERGE]; /* prev between calls, padded like a row so that it can be installed directly */
};

/* Like `mlxzip_continue`, but the emitted ids stay pushed. */
mlxzip_status mlxzip_go_on(mlxzip_codebook *b, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                           size_t *bad);

/* Returns the state word after the first `mark` ids. */
static inline uint64_t mlxzip_after(const mlxzip_codebook *b, size_t mark) {
  return mark ? b->after[mark - 1] : (uint64_t)b->params->start.n << PREV_BITS;
}

static inline size_t mlxzip_entries_in(uint64_t after) {
  return after >> PREV_BITS & (((size_t)1 << ENTRY_BITS) - 1);
}

/* Returns the base ids that id i of the log stood for when it was read, and their number in *n. */
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
