/* Internal: the running codebook. */
#ifndef MLXZIP_CODEBOOK_H
#define MLXZIP_CODEBOOK_H

#include "table.h"

/* State after each logged id, in one word: base length (38 bits), entries (21), length of prev (5). prev itself needs
 * no copy: it is always the end of the expanded log. */
enum { PREV_BITS = 5, ENTRY_BITS = 21, LENGTH_SHIFT = PREV_BITS + ENTRY_BITS };
#define MLXZIP_MAX_LOG (SIZE_MAX >> 30 < 4 ? SIZE_MAX / 64 : (size_t)1 << 30 << 4)

struct mlxzip_codebook {
  const mlxzip_params *params;
  mlxzip_table table;
  int64_t *born; /* index in the log of the id that installed the slot, -1 for start entries */
  uint32_t *log;
  uint64_t *after;
  size_t n, cap; /* of log and after */
  uint64_t base_length;
  size_t n_prev;
  uint64_t prev_hash;
  uint32_t prev[MLXZIP_MAX_MERGE]; /* padded like a row, so that it can be installed as it stands */
  uint32_t base[MLXZIP_MAX_MERGE]; /* a row for a base id: the id, padded */
};

#endif
