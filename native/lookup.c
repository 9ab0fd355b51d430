#include "lookup.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

enum { SIZES = 5, LEAST_CELLS = 256, END_BITS = 29 };

/* Runs of 2, 4, 8, 16 and 32 ids by their hash: a cell is where such a run last ended, with the number of its size in
 * the upper bits, or 0 if it is empty. At most half the cells are used. `found` is where the earlier occurrence of the
 * text's end ends, 0 without one. */
struct mlxzip_lookup {
  uint32_t *ids, *cells;
  size_t n, cap, mask, used, found;
};

static size_t length_of(size_t size) { return (size_t)MLXZIP_LOOKUP_SHORTEST << size; }

mlxzip_lookup *mlxzip_lookup_new(void) {
  mlxzip_lookup *t = calloc(1, sizeof *t);
  if (!t) return NULL;
  t->mask = LEAST_CELLS - 1;
  t->cells = calloc(LEAST_CELLS, sizeof *t->cells);
  if (t->cells) return t;
  free(t);
  return NULL;
}

void mlxzip_lookup_free(mlxzip_lookup *t) {
  if (!t) return;
  free(t->ids), free(t->cells);
  free(t);
}

static uint32_t cell_with(size_t size, size_t end) { return (uint32_t)(size << END_BITS | end); }

static size_t end_in(uint32_t cell) { return cell & (((uint32_t)1 << END_BITS) - 1); }

/* Returns the cell of the run of this size that ends at `end`, or the empty cell where it belongs. */
static uint32_t *cell_of(const mlxzip_lookup *t, size_t end, size_t size) {
  size_t length = length_of(size);
  const uint32_t *run = t->ids + end - length;
  for (size_t i = mlxzip_hash(mlxzip_hash_run(run, length), (uint32_t)length) & t->mask;; i = (i + 1) & t->mask) {
    uint32_t cell = t->cells[i];
    bool alike = cell && cell >> END_BITS == size && mlxzip_same(t->ids + end_in(cell) - length, run, length);
    if (!cell || alike) return &t->cells[i];
  }
}

/* Enters the runs that end at `end`, and notes the last earlier end of the longest of them that occurred. */
static void enter(mlxzip_lookup *t, size_t end) {
  t->found = 0;
  for (size_t size = 0; size < SIZES && length_of(size) <= end; size++) {
    uint32_t *cell = cell_of(t, end, size);
    if (*cell) t->found = end_in(*cell);
    else t->used++;
    *cell = cell_with(size, end);
  }
}

/* Makes room for n more ids and their cells. */
static bool reserve(mlxzip_lookup *t, size_t n) {
  if (n > ((size_t)1 << END_BITS) / 4 - t->n) return false;
  if (t->n + n > t->cap) {
    size_t cap = 2 * (t->n + n);
    uint32_t *ids = realloc(t->ids, cap * sizeof *ids);
    if (!ids) return false;
    t->ids = ids, t->cap = cap;
  }
  size_t cells = t->mask + 1, needed = 2 * (t->used + SIZES * n);
  if (needed <= cells) return true;
  while (cells < needed) cells *= 2;
  uint32_t *made = calloc(cells, sizeof *made);
  if (!made) return false;
  free(t->cells);
  t->cells = made, t->mask = cells - 1, t->used = 0;
  for (size_t end = 1; end <= t->n; end++) enter(t, end);
  return true;
}

int mlxzip_lookup_append(mlxzip_lookup *t, const uint32_t *ids, size_t n) {
  if (!reserve(t, n)) return -1;
  for (size_t i = 0; i < n; i++) {
    t->ids[t->n++] = ids[i];
    enter(t, t->n);
  }
  return 0;
}

size_t mlxzip_lookup_propose(const mlxzip_lookup *t, uint32_t *out, size_t most) {
  if (!t->found) return 0;
  size_t again = t->n - t->found, match = 0;
  for (size_t i = 0; i < most; i++) out[i] = t->ids[t->found + i % again];
  while (match < MLXZIP_LOOKUP_LONGEST && match < t->found && t->ids[t->found - 1 - match] == t->ids[t->n - 1 - match])
    match++;
  return match;
}
